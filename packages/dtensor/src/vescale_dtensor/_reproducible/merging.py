"""Tells whether blocks of a product may be computed as one: asks this machine's kernels, once per shape.

The blocks are what counts: their bits are the mode's. A kernel that adds up the products of an entry in the order of
`k`, whatever the shape around it, gives a large product the same bits, several times as fast. Kernels for small shapes
do otherwise (measured with MKL: fewer than 4 rows or 16 columns), so nothing is taken for granted: both are computed
of random numbers, at two alignments, and every entry must agree. Of two orders of 8 terms half of all entries tell.
Ranks may answer differently: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

CACHE_LINE = 64  # bytes, at multiples of which every entry of a batched product begins
ENTRIES = 2  # and as many alignments: what is held at a time stays below what a product itself takes
AT_ONCE = 4  # entries of a product on an accelerator


def batched(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """[entries, m, k] and [entries, n, k] to [entries, m, n]: an entry's bits follow from its numbers and shape alone.

    Measured with MKL: for most shapes the bits depend on where in a cache line the operands begin, and an entry of odd
    size begins elsewhere on one device than among the fewer of a rank; so all begin at one. For a vector that is alone
    there is another kernel; so it is computed twice. Where `out` begins does not matter.
    """
    left, right = begun_alike(left), begun_alike(right)
    if left.device.type not in ("cpu", "meta"):
        return _in_fours(left, right, out)
    if len(left) != 1 or min(left.shape[1], right.shape[1]) > 1:
        right = right.transpose(1, 2)
        return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)
    made = torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1).transpose(1, 2))[:1]
    return made if out is None else out.copy_(made)


def _in_fours(left: Tensor, right: Tensor, out: Tensor | None) -> Tensor:
    """`batched` by products of AT_ONCE entries each, the last one filled up, into memory that begins alike.

    cuBLAS chooses a kernel by the number of entries, too (measured on an H200: one entry has other bits than two for
    most shapes, and five others than eight for some), but not by an entry's place among them.
    """
    (count, m, _), n = left.shape, right.shape[1]
    out = left.new_empty(count, m, n) if out is None else out
    for at in range(0, count, AT_ONCE):
        some = slice(at, min(at + AT_ONCE, count))
        one, other = _filled_up(left[some]), _filled_up(right[some])
        out[some] = torch.bmm(one, other.transpose(1, 2))[: some.stop - at]
    return out


def _filled_up(x: Tensor) -> Tensor:
    """AT_ONCE entries, of which the last is repeated, each begun at a multiple of CACHE_LINE."""
    missing = AT_ONCE - len(x)
    return x if not missing else begun_alike(torch.cat([x, x[-1:].expand(missing, -1, -1)]))


def begun_alike(x: Tensor) -> Tensor:
    """[..., m, k] to the same values, every [m, k] contiguous and begun at a multiple of CACHE_LINE."""
    *many, m, k = x.shape
    apart = [stride for size, stride in zip(many, x.stride()) if size > 1]
    begins = (x.data_ptr(), *(stride * x.element_size() for stride in apart))
    if x.stride()[-2:] == (k, 1) and not any(at % CACHE_LINE for at in begins):
        return x
    return lines(x.new_empty, many, (m, k), x.element_size()).copy_(x)


def lines(memory: Callable, many: Sequence[int], shape: tuple[int, int], bytes_each: int) -> Tensor:
    """`memory(sizes)` as [*many, *shape], every one of which begins at a multiple of CACHE_LINE."""
    size, line = shape[0] * shape[1], CACHE_LINE // bytes_each
    return memory((*many, -(-size // line) * line))[..., :size].unflatten(-1, shape)


def merges(like: Tensor, rows: int, columns: int, shape: tuple[int, int, int]) -> bool:
    """True if `rows` times `columns` blocks [m, k] x [n, k] of `like`'s dtype have the bits of one product."""
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
        lefts, rights = a.expand(*both, m, k).reshape(-1, m, k), b.expand(*both, n, k).reshape(-1, n, k)
        wanted = batched(lefts, rights).view(*both, m, n)
        one = batched(a.view(ENTRIES, -1, k), b.view(ENTRIES, -1, k))
        if not torch.equal(one.view(ENTRIES, rows, m, columns, n).transpose(2, 3), wanted):
            return False
    return True
