"""Keys of calls: dispatch writes out those of one to three arguments, and they are those of all other calls; what
Python takes for equal and torch does not has keys of its own."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vescale_dtensor import Shard, distribute_tensor
from vescale_dtensor._dispatch.arguments import key_of
from vescale_dtensor._dispatch.dispatch import call
from vescale_dtensor._rules import registry
from vescale_testkit import mesh_of, run_ranks

CALLS = {
    "one": (Tensor.neg, lambda x: (x,), {}),
    "two": (Tensor.__add__, lambda x: (x, x), {}),
    "a float": (Tensor.__mul__, lambda x: (x, 2.0), {}),
    "sizes": (Tensor.view, lambda x: (x, (2, -1, 3)), {}),
    "sizes one by one": (Tensor.view, lambda x: (x, 2, 2, 6), {}),
    "a torch.Size": (Tensor.expand, lambda x: (x, torch.Size((4, 6))), {}),
    "dims": (Tensor.transpose, lambda x: (x, 0, 1), {}),
    "three tensors": (F.linear, lambda x: (x, x, None), {}),
    "a bias": (F.linear, lambda x: (x, x, x[:, 0]), {}),
    "a bool as the third": (Tensor.sum, lambda x: (x, 0, True), {}),
    "floats": (Tensor.clamp, lambda x: (x, 0.0, 1.0), {}),
    "a dtype as the third": (Tensor.softmax, lambda x: (x, 1, torch.float32), {}),
    "a tuple of tensors": (torch.cat, lambda x: ((x, x),), {}),
    "a list of tensors": (torch.cat, lambda x: ([x, x], 1), {}),
    "an index": (Tensor.__getitem__, lambda x: (x, (Ellipsis, slice(1, 3))), {}),
    "names": (Tensor.sum, lambda x: (x, 0), {"keepdim": True}),
    "a bool by name": (Tensor.mean, lambda x: (x, 1), {"keepdim": False}),
}


def written_out(name: str) -> None:
    x = distribute_tensor(torch.arange(24.0).view(4, 6), mesh_of(1), (Shard(0),))
    function, args, kwargs = CALLS[name]
    entry = registry.TABLE[function]
    entry.cache.clear()
    call(function, *args(x), **kwargs)
    assert key_of(args(x), kwargs, entry.exact) in entry.cache


def test_a_key_that_is_written_out_is_that_of_other_calls():
    run_ranks(1, all_written_out)


def all_written_out() -> None:
    for name in CALLS:
        written_out(name)


WRITTEN_OUT = ["one", "two", "dims", "three tensors", "a bias"]


def calls_for_keys() -> dict[str, int]:
    """Per call of `CALLS`: how many Python functions make its key."""
    x, found = distribute_tensor(torch.arange(24.0).view(4, 6), mesh_of(1), (Shard(0),)), Counter()
    for name in WRITTEN_OUT:
        function, args, kwargs = CALLS[name]
        given = args(x)

        def note(frame, event, _, name=name):
            found[name] += event == "call" and frame.f_code.co_name in ("key_of", "keyed", "_items")

        call(function, *given, **kwargs)
        sys.setprofile(note)
        try:
            call(function, *given, **kwargs)
        finally:
            sys.setprofile(None)
    return found


def test_a_key_that_is_written_out_costs_no_call():
    assert run_ranks(1, calls_for_keys) == [dict.fromkeys(WRITTEN_OUT, 0)]


def apart(first: object, second: object) -> None:
    whole = torch.arange(24.0).view(4, 6)
    x = distribute_tensor(whole, mesh_of(1), (Shard(0),))
    for index in (first, second, first):
        assert torch.equal(x[index].full_tensor(), whole[index])


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, True), ((1, 0), (True, 0)), ((0, 1), [0, 1]), ((1, 1), (1, slice(1, 2)))],
    ids=str,
)
def test_equal_for_python_is_not_equal_for_torch(first, second):
    run_ranks(1, apart, first, second)
