"""Products of odd sizes in the reproducible mode, forward and both gradients: equal to the bit on every mesh.

Where a block begins in memory and how many lie beside it differ between one device and a rank, and kernels' bits may
follow either; blocks of 13 rows or 25 columns show it, powers of two do not.
"""

import itertools

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

import vescale
from vescale_dtensor import Replicate, Shard
from vescale_testkit import mesh_of, run_ranks, slice_of, warm_up

warm_up("vescale")

SPLITS = {"batch": 4, "hidden": 4, "seq": 4}
# Rows, summed, columns: every dim once odd, once in odd blocks.
SIZES = [
    (52, 50, 49), (50, 52, 53), (49, 52, 51), (51, 50, 52), (53, 49, 52), (52, 4, 52), (96, 4, 50), (36, 20, 4),
    (52, 52, 1), (1, 52, 52), (4, 100, 52), (52, 100, 4), (3, 44, 12), (200, 28, 2), (12, 156, 1), (52, 16, 52),
]  # fmt: skip


def attention(a, b):
    """Keys and values alike, [batch, heads, length, width]."""
    return scaled_dot_product_attention(a, b, b, is_causal=True)


def products(rows, summed, columns):
    """(name, function, sizes of its operands)."""
    flat = ([rows, summed], [columns, summed])
    yield "linear", linear, flat
    yield "linear with a sequence", linear, ([4, rows, summed], [columns, summed])
    yield "matmul", lambda a, b: a @ b.mT, flat
    yield "matmul of a transposed", lambda a, b: a.mT.contiguous().mT @ b.t(), flat
    yield "bmm", lambda a, b: torch.bmm(a, b.mT), ([4, rows, summed], [4, columns, summed])
    yield "einsum", lambda a, b: torch.einsum("bik,jk->jbi", a, b), ([4, rows, summed], [columns, summed])
    yield "attention", attention, ([4, 4, rows, summed], [4, 4, columns, summed])


def placed(shape, ranks):
    return [Replicate(), *[Shard(d) for d, size in enumerate(shape) if size % ranks == 0]]


def computed(function, operands):
    leaves = [x.requires_grad_() for x in operands]
    with vescale.reproducible(SPLITS):
        out = function(*leaves)
        seed = torch.linspace(-1, 1, out.numel()).sin().to(out.dtype)
        out.backward(seed.view(out.mT.shape).mT)  # not contiguous
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in (out.detach(), *(x.grad for x in leaves))]


def differing(sizes, dtype, ranks):
    """What differs from one device: (function, placements, which of the result and the gradients are equal)."""
    found, tried = [], 0
    for name, function, shapes in products(*sizes):
        generator = torch.Generator().manual_seed(0)
        operands = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        wanted = computed(function, [x.clone() for x in operands])
        for placements in itertools.product(*[placed(shape, ranks) for shape in shapes]):
            there = [vescale.distribute_tensor(x, mesh_of(ranks), [p]) for x, p in zip(operands, placements)]
            equal = [torch.equal(x, y) for x, y in zip(computed(function, there), wanted, strict=True)]
            tried += 1
            if not all(equal):
                found.append((name, placements, equal))
    return found, tried


def of_sizes(chosen, dtype, ranks):
    return {sizes: differing(sizes, dtype, ranks) for sizes in chosen}


GRID = [(ranks, dtype, part) for ranks in (2, 4) for dtype in (torch.float32, torch.bfloat16) for part in range(5)]


@pytest.mark.parametrize(("ranks", "dtype", "part"), slice_of(GRID, 8))
def test_products_of_odd_sizes_are_equal_to_the_bit(ranks, dtype, part):
    for rank in run_ranks(ranks, of_sizes, SIZES[part::5], dtype, ranks, timeout=300):
        assert {sizes: found for sizes, (found, _) in rank.items() if found} == {}
        assert sum(tried for _, tried in rank.values()) > 60
