"""Context parallelism: attention over a cut sequence, in a ring, by heads and gathered, against one device."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import Replicate, Shard
from vescale_dtensor._context.choice import AUTO, GATHER, HEADS, RING, pin
from vescale_dtensor._oracle import compare
from vescale_dtensor.engine import mesh_of as engine_mesh
from vescale_dtensor.testing import mesh_of, run_ranks

SDPA = F.scaled_dot_product_attention
WAYS = (RING, HEADS, GATHER, AUTO)


def _attend(mesh, axis, way, q, k, v, at, *, mask=None, dtype=torch.float64, **options):
    """Values and gradients of one problem, against one device. Returns the events."""
    pin(engine_mesh(mesh), axis, way)
    tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in (q, k, v)]
    if mask is None:
        return compare(lambda *t: SDPA(*t, **options), tensors, [at] * 3, mesh)
    places = tuple(Replicate() for _ in at)
    return compare(lambda *t: SDPA(*t, **options), [*tensors, mask], [at] * 3 + [places], mesh)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_values_and_gradients(ranks, way):
    def check():
        mesh = mesh_of(ranks)
        for rows, columns, causal in itertools.product((8, 7, 3), (8, 9), (False, True)):
            q, kv = (2, 4, rows, 4), (2, 4, columns, 4)
            _attend(mesh, 0, way, q, kv, kv, (Shard(2),), is_causal=causal, scale=0.3)
        _attend(mesh, 0, way, (2, 4, 8, 4), (2, 2, 8, 4), (2, 2, 8, 6), (Shard(2),), is_causal=True, enable_gqa=True)

    run_ranks(ranks, check)
