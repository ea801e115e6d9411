"""view, reshape, flatten, unflatten on shards."""

from __future__ import annotations

import itertools
import warnings
from math import prod

import pytest
import torch
from vescale_dtensor import FallbackWarning, InterleavedShard, RaggedShard, Replicate, Shard
from vescale_dtensor._oracle import compare, placements_for
from vescale_dtensor.testing import mesh_of, run_ranks

R, S = Replicate(), Shard


def native():
    warnings.simplefilter("error", FallbackWarning)


def values(*shape):
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()


GRID = [
    ((4, 6), [(24,), (2, 2, 6), (4, 3, 2), (4, 2, 3), (6, 4), (2, 12), (8, 3), (1, 4, 6), (4, 6, 1), (-1, 2)]),
    ((5, 6), [(30,), (6, 5), (5, 2, 3), (10, 3), (15, 2)]),
    ((2, 3, 4), [(6, 4), (2, 12), (24,), (3, 8), (2, 3, 2, 2), (2, 3, 1, 4), (4, 6), (2, 6, 2)]),
    ((3, 1, 4), [(3, 4), (12,), (3, 2, 2), (1, 3, 4), (4, 3)]),
    ((8,), [(2, 4), (4, 2), (2, 2, 2), (8, 1), (1, 8)]),
    ((1,), [(), (1, 1)]),
    ((0, 4), [(4, 0), (0,), (0, 2, 2), (2, 0, 7)]),
]


@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_grid(sizes):
    def work():
        native()
        mesh = mesh_of(*sizes)
        for shape, targets in GRID:
            for target, placements in itertools.product(targets, placements_for(shape, len(sizes))):
                compare(lambda x: x.view(target) * 2, [values(*shape)], [placements], mesh, bitwise=True)

    run_ranks(4, work)


PATTERNS = [
    ("heads", (2, 4, 8), lambda x: x.view(2, 4, 4, 2), [S(2)], [S(2)]),
    ("heads back", (2, 4, 4, 2), lambda x: x.view(2, 4, -1), [S(2)], [S(2)]),
    ("tokens", (2, 4, 8), lambda x: x.view(8, 8), [S(1)], [InterleavedShard(0, 2)]),
    ("tokens back", (8, 8), lambda x: x.view(2, 4, 8), [InterleavedShard(0, 2)], [S(1)]),
    ("batch", (4, 2, 8), lambda x: x.view(-1, 8), [S(0)], [S(0)]),
    ("batch back", (8, 8), lambda x: x.view(4, 2, 8), [S(0)], [S(0)]),
    ("uneven batch", (5, 2), lambda x: x.view(-1), [S(0)], [RaggedShard((0,), (2, 2, 1, 0))]),
    ("qkv", (2, 4, 24), lambda x: x.view(2, 4, 3, 4, 2), [InterleavedShard(2, 3)], [S(3)]),
    ("qkv back", (2, 4, 3, 4, 2), lambda x: x.reshape(2, 4, 24), [S(3)], [InterleavedShard(2, 3)]),
]


def test_patterns_without_communication():
    def work():
        native()
        mesh = mesh_of(4)
        from vescale_dtensor import distribute_tensor

        for name, shape, function, before, after in PATTERNS:
            assert compare(function, [values(*shape)], [before], mesh, bitwise=True) == [], name
            out = function(distribute_tensor(values(*shape), mesh, before))
            assert list(out.placements) == after, f"{name}: {out.placements}"

    run_ranks(4, work)
