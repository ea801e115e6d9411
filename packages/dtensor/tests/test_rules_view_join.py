"""cat, stack, split, chunk, unbind, ... on shards."""

from __future__ import annotations

import itertools
import warnings
from math import prod

import pytest
import torch
from vescale_dtensor import FallbackWarning, InterleavedShard, Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor._oracle import compare, placements_for
from vescale_dtensor.testing import mesh_of, run_ranks

R, S, P = Replicate(), Shard, Partial()


def native():
    warnings.simplefilter("error", FallbackWarning)


def values(*shape):
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()


PARTS = [
    ((4, 6), lambda x: x.split(2, 1)),
    ((4, 6), lambda x: x.split(4, dim=-1)),
    ((5, 6), lambda x: torch.split(x, [1, 0, 4])),
    ((4, 6), lambda x: x.split_with_sizes((2, 4), 1)),
    ((5, 6), lambda x: (*x.chunk(2), *torch.chunk(x, 4, dim=1))),
    ((5, 3), lambda x: (*x.unbind(), *torch.unbind(x, -1))),
    ((5, 6), lambda x: (*x.tensor_split(2), *torch.tensor_split(x, (1, 3), dim=1))),
    ((4, 6), lambda x: (*x.hsplit(2), *torch.vsplit(x, [1, 3]))),
    ((4, 6), lambda x: list(x)),
]
GROUPS = [InterleavedShard(1, 3), InterleavedShard(1, 2)]


@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_parts(sizes):
    def work():
        native()
        mesh = mesh_of(*sizes)
        for shape, function in PARTS:
            for placements in placements_for(shape, len(sizes)):
                compare(function, [values(*shape)], [placements], mesh, bitwise=True)

    run_ranks(4, work)


@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_joins(sizes):
    def work():
        native()
        mesh = mesh_of(*sizes)
        for dim in (0, 1):
            for one, two in itertools.product(placements_for((4, 4), len(sizes)), repeat=2):
                compare(lambda x, y: torch.cat([x, y, x], dim), [values(4, 4), values(4, 4)], [one, two], mesh)
                if one == two:
                    compare(lambda x, y: torch.stack([x, y], dim), [values(4, 4), values(4, 4)], [one, two], mesh)

    run_ranks(4, work)
