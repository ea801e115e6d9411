"""Strides of a shard, and of the whole that it is a part of. Pure.

The order of a tensor's dims in memory counts: one device draws by it, and gives like tensors the same. A shard's
strides tell it, those of dims that are cut to one index, too, which are never used to find an element: by them the
dim lies where it lies on one device. torch's kernels do not keep them (to a kernel such a shard is contiguous), so
whatever makes a shard gives it the strides of `local_stride`.

Two dims of one index may have equal strides. Of those the later dim is the inner, as in a fresh tensor; where one
device has it otherwise, the outer's stride is APART times the inner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .layout import Layout

APART = 1021
"""Between strides of dims of one index that would be equal: a prime, which no size is likely to have as a factor."""


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a fresh tensor."""
    return tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def dense_strides(order: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, of dims that lie in memory in this order, from the outermost."""
    strides = row_major([sizes[dim] for dim in order])
    return tuple(strides[order.index(dim)] for dim in range(len(order)))


def memory_order(strides: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """The dims from the outermost in memory, of equal strides the one of one index the inner; expanded dims stay where
    they are. None if that is their own order. A part that is copied out of a tensor keeps it, for a draw into the
    part, or into one made like it, goes by that order."""
    dims = [dim for dim, stride in enumerate(strides) if stride]
    ranked = sorted(dims, key=lambda dim: (-strides[dim], sizes[dim] == 1, dim))
    if ranked == dims:
        return None
    rest = iter(ranked)
    return [next(rest) if stride else dim for dim, stride in enumerate(strides)]


def cut_to_one(layout: Layout) -> list[int]:
    """The dims of which this rank has one index or none, and the whole more."""
    if layout.flat_axis is not None:
        return []
    return [dim for dim, (own, size) in enumerate(zip(layout.local_shape, layout.shape)) if own <= 1 < size]


def global_stride(strides: Sequence[int], sizes: Sequence[int], layout: Layout) -> tuple[int, ...] | None:
    """One device's strides, from those of a shard of `sizes`; None if they do not follow from these.

    Behind every dim that is cut lies less than on the whole: strides of the dims outside of it grow by what the cut
    took. Of dims with equal strides the one of one index is the inner, as in a fresh tensor.
    """
    if layout.flat_axis is not None:
        return row_major(layout.shape)
    strides, apart = _told(strides, sizes, layout)
    order = sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim] > 1, apart.get(dim, 0), -dim))
    found, grown, shrunk = [0] * len(sizes), 1, 1
    for dim in order:
        if strides[dim] * grown % shrunk:
            return None
        found[dim] = strides[dim] * grown // shrunk
        if strides[dim]:
            grown, shrunk = grown * layout.shape[dim], shrunk * max(sizes[dim], 1)
    return tuple(found)


def _told(strides: Sequence[int], sizes: Sequence[int], layout: Layout) -> tuple[Sequence[int], dict[int, int]]:
    """The strides without APART, and of each dim of one index, how often it had that as a factor."""
    ones = [dim for dim, size in enumerate(sizes) if size <= 1 < layout.shape[dim] and strides[dim]]
    if len(ones) < 2:
        return strides, {}
    known, plain, apart = {strides[dim] for dim in ones}, list(strides), {}
    for dim in ones:
        while plain[dim] % APART == 0 and plain[dim] // APART in known:
            plain[dim] //= APART
            apart[dim] = apart.get(dim, 0) + 1
    return plain, apart


def local_stride(whole: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """The strides of this rank's shard without gaps, its dims in the order that they have on one device, where the
    tensor has the strides `whole`. `global_stride` finds that order again."""
    sizes = layout.local_shape
    order = sorted(range(len(sizes)), key=lambda dim: (whole[dim], layout.shape[dim] > 1, -dim))  # from the innermost
    found, below = [0] * len(sizes), 1
    last, apart = None, 1  # of the dims of one index in this place
    for dim in order:
        if not whole[dim]:
            continue
        found[dim] = below
        if sizes[dim] > 1:
            below, last, apart = below * sizes[dim], None, 1
        elif layout.shape[dim] > 1:
            if last is not None and dim > last:
                apart *= APART
            found[dim], last = below * apart, dim
    return tuple(found)
