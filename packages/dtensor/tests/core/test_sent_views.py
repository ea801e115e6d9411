"""A view that was a copy, and is gone: a transfer's thread may hold its memory a little longer, and no rank raises."""

import gc
from threading import Timer

import pytest
import torch

from vescale_dtensor import Shard, ViewError, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

SENT = {
    "size": lambda x: torch.full((x[0].long() + 1,), 2.0),
    "number": lambda x: x[0].item(),
    "whole": lambda x: x[1:2].full_tensor(),
    "sum": lambda x: (x[0] + x[1]).sum().full_tensor(),
    "bool": lambda x: bool(x[0] > 0),
    "compared": lambda x: torch.equal(x[:1], x[2:]),
}


def written_after(name):
    x, gone = distribute_tensor(torch.tensor([1.0, 2.0, 3.0]), mesh_of(2), [Shard(0)]), 0
    gc.disable()
    for _ in range(40):
        SENT[name](x)
        x.mul_(1.0)
        gone += 1
    return gone


@pytest.mark.parametrize("name", SENT)
def test_a_view_that_was_sent_and_dropped_keeps_nobody_from_writing(name):
    assert run_ranks(2, written_after, name, timeout=60) == [40, 40]


def held(rest):
    """As a transfer's thread: holds the memory of a copied view after the view is gone."""
    x = distribute_tensor(torch.tensor([1.0, 2.0, 3.0]), mesh_of(2), [Shard(0)])
    row = x[0]
    kept = [row.to_local().untyped_storage()]
    if not rest:
        Timer(0.02, kept.clear).start()
    del row
    try:
        x.mul_(2.0)
    except ViewError:
        return "refused"
    return x.full_tensor().tolist()


def test_memory_that_is_let_go_soon_is_waited_for():
    assert run_ranks(2, held, False, timeout=60) == [[2.0, 4.0, 6.0]] * 2
    assert run_ranks(2, held, True, timeout=60) == ["refused"] * 2
