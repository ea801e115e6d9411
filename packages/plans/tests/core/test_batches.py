"""Batches given in a wrong way: of another rank, dtype or kind; each is an error, alike on all ranks."""

import pytest
import torch
import torch.distributed as dist

from vescale_dtensor import PlacementError, PlainTensorError, ShapeError
from vescale_plans import Plan
from vescale_testkit import raises_on_all, run_ranks

PLAN = {"mesh": {"dp": 2}, "parameters": {"*": {}}, "data_axis": "dp"}


def _local_batch_of_a_dtensor():
    plan = Plan(**PLAN)
    plan.local_batch(plan.shard_batch(torch.ones(8, 6)))


def _another_dtype():
    Plan(**PLAN).local_batch({"x": torch.ones(4, 6, dtype=[torch.float32, torch.float64][dist.get_rank()])})


def _an_empty_rank():
    Plan(**PLAN).local_batch(torch.ones([3, 0][dist.get_rank()], 6))


def _own_data_to_be_cut():
    Plan(**PLAN).shard_batch({"x": torch.full((4, 6), float(dist.get_rank()))})


@pytest.mark.parametrize(
    ("wrong", "kind", "remedy"),
    [
        (_local_batch_of_a_dtensor, PlacementError, "what is a DTensor already"),
        (_another_dtype, ShapeError, "disagree on the dtype"),
        (_an_empty_rank, ShapeError, "drop_last=True"),
        (_own_data_to_be_cut, PlainTensorError, "local_batch"),
    ],
)
def test_a_wrong_batch_is_an_error(wrong, kind, remedy):
    text = raises_on_all(2, kind, wrong, match=remedy)
    assert "Plan." in text


def test_right_batches_are_cut():
    def cut():
        plan = Plan(**PLAN)
        whole = torch.arange(12.0).view(6, 2)
        mine = whole.tensor_split(2)[dist.get_rank()]
        return [part.full_tensor() for part in (plan.shard_batch(whole), plan.local_batch(mine))]

    for parts in run_ranks(2, cut):
        assert all(torch.equal(part, torch.arange(12.0).view(6, 2)) for part in parts)
