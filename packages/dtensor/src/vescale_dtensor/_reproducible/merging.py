"""Whether blocks of a product may be computed as one: asked of this machine's kernels, once per shape.

The blocks are what counts: their bits are the mode's. A kernel that adds up the products of an entry in the order of
`k`, whatever the shape around it, gives a large product the same bits, several times as fast. Kernels for small shapes
do otherwise (measured with MKL: fewer than 4 rows or 16 columns), so nothing is taken for granted: both are computed
of random numbers, at two alignments, and every entry must agree. Of two orders of 8 terms half of all entries tell.
Ranks may answer differently: the bits are the same.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

ENTRIES = 2  # and as many alignments: what is held at a time stays below what a product itself takes


def merges(like: Tensor, rows: int, columns: int, shape: tuple[int, int, int]) -> bool:
    """Whether `rows` times `columns` blocks [m, k] x [n, k] of `like`'s dtype have the bits of one product."""
    if rows == columns == 1:
        return False
    return _asked(like.dtype, like.device, rows, columns, shape, torch.get_num_threads())


@lru_cache(maxsize=4096)
def _asked(
    dtype: torch.dtype, device: torch.device, rows: int, columns: int, shape: tuple[int, int, int], threads: int
) -> bool:
    m, k, n = shape
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(ENTRIES * count * k + 1, generator=generator).to(device, dtype) for count in (rows * m, columns * n)
    )
    for start in (0, 1):
        a = left[start : len(left) - 1 + start].view(ENTRIES, rows, 1, m, k)
        b = right[start : len(right) - 1 + start].view(ENTRIES, 1, columns, n, k)
        both = (ENTRIES, rows, columns)
        wanted = torch.bmm(
            a.expand(*both, m, k).reshape(-1, m, k), b.expand(*both, n, k).reshape(-1, n, k).transpose(1, 2)
        ).view(*both, m, n)
        one = torch.bmm(a.view(ENTRIES, -1, k), b.view(ENTRIES, -1, k).transpose(1, 2))
        if not torch.equal(one.view(ENTRIES, rows, m, columns, n).transpose(2, 3), wanted):
            return False
    return True
