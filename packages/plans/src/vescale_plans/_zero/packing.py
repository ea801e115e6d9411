"""Packing: where each tensor lies in a flat bucket that ranks share in equal, contiguous parts. Pure.

Part r is [r * part, (r + 1) * part). A tensor is contiguous and may lie across boundaries of
parts; a boundary inside it may only fall between two of its blocks (rows that belong
together: quantisation tiles, heads), counted from its start. Tensors keep their order, or
are sorted by falling block, whichever gives the shorter part; gaps are padding.

The heuristic is that of veScale-FSDP (arXiv 2602.22437, planning): a part that is a
multiple of the blocks lets whole tensors lie across boundaries without gaps, so the
candidates for `part` are multiples of a block, or of the least common multiple of some;
for each, the shortest part that takes all tensors is found by bisection, placing them
greedily. A placement is one walk over the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

# Beyond this a multiple of blocks is coarser than what it saves.
_MOST_CANDIDATES = 6


@dataclass(frozen=True)
class Packing:
    """`starts[i]`: the first element of tensor i; `part`: elements per rank; `ranks * part` in all."""

    starts: tuple[int, ...]
    part: int
    ranks: int

    @property
    def total(self) -> int:
        return self.part * self.ranks

    def held(self, tensor: int, numel: int, rank: int) -> tuple[int, int]:
        """The half-open range of tensor `tensor`, of `numel` elements, that `rank` holds."""
        start = self.starts[tensor]
        low, high = rank * self.part - start, (rank + 1) * self.part - start
        return min(max(low, 0), numel), min(max(high, 0), numel)

    def gaps(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """The half-open ranges of the bucket in which no tensor lies, of which each rank holds `sizes` elements."""
        found, at = [], 0
        for start, size in sorted(zip(self.starts, sizes)):
            found.append((at, start))
            at = start + size
        return [(low, high) for low, high in (*found, (at, self.total)) if low < high <= self.total]

    def units(self, tensor: int, numel: int) -> tuple[int, ...]:
        """Elements of the tensor that each rank holds: the local units of its RaggedShard."""
        bounds = [self.held(tensor, numel, rank) for rank in range(self.ranks)]
        return tuple(stop - start for start, stop in bounds)


def pack(sizes: Sequence[int], ranks: int, *, blocks: Sequence[int] | None = None, align: int = 1) -> Packing:
    """A packing of tensors of `sizes` elements over `ranks`.

    Arguments:
        blocks: per tensor, elements that must stay together; 1 where any boundary will do.
        align: every tensor, and every part, starts at a multiple of so many elements.

    Tensors that one part cannot take without splitting a block make it longer.
    """
    blocks = [1] * len(sizes) if blocks is None else list(blocks)
    filled = sum(sizes)
    best: tuple[int, list[int]] | None = None
    orders = [list(range(len(sizes)))]
    if max(blocks, default=1) > 1:
        orders.append(sorted(orders[0], key=lambda i: (-blocks[i], i)))
    for order in orders:
        sized = [(sizes[i], blocks[i]) for i in order]
        for unit in _candidates(blocks, align, filled // ranks + 1):
            found = _shortest(sized, ranks, unit, align, best[0] if best else None)
            if found is not None:
                part, starts = found
                best = part, [start for _, start in sorted(zip(order, starts))]
    part, starts = best
    return Packing(tuple(starts), part, ranks)


def _candidates(blocks: Sequence[int], align: int, ideal: int) -> list[int]:
    """Units of which a part may be a multiple, the finest first."""
    different = sorted({block for block in blocks if block > 1})
    units = {align}
    running = align
    for block in different:
        units.add(lcm(align, block))
        running = lcm(running, block)
        units.add(running)
    fine = sorted(unit for unit in units if unit <= max(ideal, align)) or [align]
    return fine if len(fine) <= _MOST_CANDIDATES else [fine[0], *fine[1 - _MOST_CANDIDATES :]]


def _shortest(sized: list[tuple[int, int]], ranks: int, unit: int, align: int, limit: int | None):
    """(part, starts) with the shortest part that is a multiple of `unit` and below `limit`; None if there is none."""
    low = max(1, -(-sum(size for size, _ in sized) // (ranks * unit)))  # in units
    high = low
    while (starts := _place(sized, ranks, high * unit, align)) is None:
        if limit is not None and high * unit >= limit:
            return None
        low, high = high + 1, high + max(1, high // 16)
    found = high, starts
    while low < high:
        middle = (low + high) // 2
        starts = _place(sized, ranks, middle * unit, align)
        if starts is None:
            low = middle + 1
        else:
            high, found = middle, (middle, starts)
    part = found[0] * unit
    return (part, found[1]) if limit is None or part < limit else None


def _place(sized: list[tuple[int, int]], ranks: int, part: int, align: int) -> list[int] | None:
    """Starts of the tensors one after the other, each as early as its blocks allow; None when they do not fit."""
    at, total, starts = 0, ranks * part, []
    for size, block in sized:
        at = -(-at // align) * align
        boundary = (at // part + 1) * part
        if block > 1 and at + size > boundary:
            step = lcm(block, align)
            start = boundary - (boundary - at) // step * step  # the boundary is whole blocks away
            if part % block and start + size > boundary + part:  # and the next one would not be
                start = boundary
                if size > part:
                    start += part - part // step * step
                    if start + size > boundary + 2 * part:
                        return None
            at = start
        starts.append(at)
        at += size
        if at > total:
            return None
    return starts
