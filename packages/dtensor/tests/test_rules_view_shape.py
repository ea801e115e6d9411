"""permute, squeeze, expand, repeat, ... on shards."""

from __future__ import annotations

import warnings
from math import prod

import pytest
import torch
from vescale_dtensor import FallbackWarning, InterleavedShard, Replicate, Shard, distribute_tensor
from vescale_dtensor._oracle import compare, placements_for
from vescale_dtensor.testing import mesh_of, run_ranks

R, S = Replicate(), Shard


def native():
    warnings.simplefilter("error", FallbackWarning)


def values(*shape):
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()


CASES = [
    ((3, 4, 2), lambda x: x.permute(2, 0, 1)),
    ((3, 4, 2), lambda x: torch.permute(x, (2, 0, -2))),
    ((3, 4, 2), lambda x: x.transpose(-1, 0)),
    ((3, 4, 2), lambda x: torch.swapaxes(x, 1, 2)),
    ((3, 4, 2), lambda x: x.swapdims(1, 2)),
    ((3, 4, 2), lambda x: torch.transpose(x, dim0=1, dim1=2)),
    ((3, 4, 2), lambda x: x.movedim(0, 2)),
    ((3, 4, 2), lambda x: torch.moveaxis(x, (0, 1), (-1, 0))),
    ((3, 4), lambda x: x.t()),
    ((3, 4), lambda x: x.T + x.H.mT.mH),
    ((3, 4, 2), lambda x: x.mT + x.mH + x.adjoint()),
    ((3, 4), lambda x: (x.unsqueeze(0), x.unsqueeze(-1), torch.unsqueeze(x, dim=1))),
    ((1, 4, 1), lambda x: (x.squeeze(), x.squeeze(0), x.squeeze((0, 2)), x.squeeze(1), torch.squeeze(x, dim=-1))),
    ((2, 1, 4), lambda x: (x.squeeze(), x.squeeze(0), x.squeeze(1))),
    ((1, 4), lambda x: (x.expand(3, 4), x.expand(2, 3, -1), x.expand((3, -1)), torch.broadcast_to(x, (2, 4)))),
    ((1, 4, 1), lambda x: x.expand(3, -1, 5)),
    ((4, 5), lambda x: (x.repeat(1, 1), x.repeat(2, 3), x.repeat((2, 1, 3)), x.tile((2,)), torch.tile(x, (2, 1, 2)))),
    ((4, 5), lambda x: (x.repeat_interleave(3, 1), x.repeat_interleave(2, dim=0), torch.repeat_interleave(x, 2))),
    ((4,), lambda x: (torch.atleast_1d(x), torch.atleast_2d(x), torch.atleast_3d(x))),
    ((), lambda x: (torch.atleast_1d(x), torch.atleast_2d(x), torch.atleast_3d(x))),
    ((4, 5), lambda x: torch.atleast_3d(x, x[None])),
    ((4, 5), lambda x: (x.flatten(), torch.flatten(x, 1), x.ravel(), x.reshape(-1, 2), x.unflatten(0, (2, 2)))),
    ((4, 6), lambda x: (torch.unflatten(x, 1, (3, -1)), x.view_as(torch.zeros(6, 4)), x.reshape_as(x.t()))),
    ((4, 4), lambda x: (x.diagonal(), torch.diagonal(x, 1), torch.diag_embed(x), torch.diag_embed(x, 1, 0, 2))),
    ((2, 4, 4), lambda x: (x.diagonal(0, 1, 2), torch.linalg.diagonal(x), x.unfold(1, 2, 1), x.unfold(-1, 3, 2))),
    ((4,), lambda x: torch.meshgrid(x, x * 2, indexing="xy")),
    ((4,), lambda x: torch.meshgrid([x, x * 2], indexing="ij")),
    ((4, 1), lambda x: torch.broadcast_tensors(x, torch.zeros(3))),
    ((4, 1), lambda x: (x.expand_as(torch.zeros(4, 3)), x.expand_as(x.expand(2, 4, 3)))),
]


@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_grid(sizes):
    def work():
        mesh = mesh_of(*sizes)
        for shape, function in CASES:
            for placements in placements_for(shape, len(sizes)):
                compare(function, [values(*shape)], [placements], mesh, bitwise=True)

    run_ranks(4, work)
