"""Regions: which index ranges of a dim each rank of an axis holds. Pure geometry.

A cut of a dim of `size` over `count` ranks is, per rank, a tuple of half-open
ranges in the order in which the local tensor holds them. A plain shard has one
range per rank, an interleaved one has one per group, or several. The local size is the sum
of their lengths; the ranges of all ranks partition the dim.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from ..placement import InterleavedShard, Shard
from .state import State, state_of

Ranges = tuple[tuple[int, int], ...]
Box = tuple[tuple[tuple[int, int], ...], int]
"""Per dim a half-open index range of the global tensor, and the offset of the first element in the flat local one."""


@lru_cache(maxsize=65536)
def cut(state: State, size: int, count: int) -> tuple[Ranges, ...]:
    """Ranges of a dim of `size` that each of `count` ranks holds under the sharded `state`."""
    if state.units is not None:
        total = sum(state.units)
        bounds, at = [], 0
        for unit in state.units:
            length = size * unit // total
            bounds.append(((at, at + length),))
            at += length
        return tuple(bounds)
    group = size // state.groups
    if state.order is not None:
        return tuple(_ordered(rank, state.order, group, state.groups) for rank in range(count))
    chunk = -(-group // count)  # torch.chunk: the first ranks get the ceiling, the last ones what is left
    return tuple(
        tuple(
            (g * group + min(rank * chunk, group), g * group + min((rank + 1) * chunk, group))
            for g in range(state.groups)
        )
        for rank in range(count)
    )


def _ordered(rank: int, order: tuple[int, ...], group: int, groups: int) -> Ranges:
    """Returns this rank's chunks of each group."""
    chunk = -(-group // len(order))
    found = [
        (g * group + min(at * chunk, group), g * group + min((at + 1) * chunk, group))
        for g in range(groups)
        for at, owner in enumerate(order)
        if owner == rank
    ]
    return tuple((start, stop) for start, stop in found if start < stop) or ((0, 0),)


def cut_ranges(placement: Shard | InterleavedShard, size: int, count: int) -> tuple[Ranges, ...]:
    """Returns each rank's part of a dim of `size` under a public placement."""
    return cut(state_of(placement), size, count)


@lru_cache(maxsize=65536)
def cut_sizes(state: State, size: int, count: int) -> tuple[int, ...]:
    """Returns how many indices of a dim of `size` each of `count` ranks holds. Does not list the ranges: groups can be
    many."""
    if state.units is not None:
        return tuple(stop - start for ((start, stop),) in cut(state, size, count))
    if state.order is not None:
        return tuple(sum(stop - start for start, stop in held) for held in cut(state, size, count))
    return tuple(state.groups * length for length in chunks(size // state.groups, count))


@lru_cache(maxsize=65536)
def flat_cut(state: State, size: int) -> tuple[Ranges, ...]:
    """The range of a flattened shard of `size` elements that each rank holds under the flat `state`."""
    bounds, at = [], 0
    for unit in state.units:
        bounds.append(((min(at, size), min(at + unit, size)),))
        at += unit
    return tuple(bounds)


def boxes(region: tuple[Ranges, ...], start: int, stop: int) -> list[Box]:
    """The flat range [start, stop) of a row-major shard that holds `region`, as boxes; each contiguous in the shard."""
    sizes = [sum(high - low for low, high in ranges) for ranges in region]
    found: list[Box] = []

    def global_ranges(dim: int, low: int, high: int) -> Ranges:
        at, ranges = 0, []
        for first, last in region[dim]:
            a, b = max(low, at), min(high, at + last - first)
            if a < b:
                ranges.append((first + a - at, first + b - at))
            at += last - first
        return tuple(ranges)

    def walk(dim: int, prefix: Ranges, low: int, high: int, offset: int) -> None:
        """Elements [low, high) of dims `dim` and on, flattened, within the one index that `prefix` names."""
        if low >= high:
            return
        if dim == len(sizes):
            found.append((prefix, offset))
            return
        inner = prod(sizes[dim + 1 :])
        first, last = -(-low // inner), high // inner
        if first > last:  # within one index
            index = low // inner
            walk(dim + 1, (*prefix, *global_ranges(dim, index, index + 1)), low % inner, high - index * inner, offset)
            return
        if low % inner:
            walk(dim + 1, (*prefix, *global_ranges(dim, first - 1, first)), low % inner, inner, offset)
            offset += first * inner - low
        if all(len(ranges) == 1 for ranges in region[dim + 1 :]):
            for span in global_ranges(dim, first, last):
                found.append(((*prefix, span, *(ranges[0] for ranges in region[dim + 1 :])), offset))
                offset += (span[1] - span[0]) * inner
        else:
            for index in range(first, last):
                walk(dim + 1, (*prefix, *global_ranges(dim, index, index + 1)), 0, inner, offset)
                offset += inner
        walk(dim + 1, (*prefix, *global_ranges(dim, last, last + 1)), 0, high - last * inner, offset)

    if all(sizes):
        walk(0, (), start, stop, 0)
    return found


def chunks(size: int, count: int) -> list[int]:
    """The sizes that torch.chunk gives, with zeros where it gives fewer parts."""
    chunk = -(-size // count)
    return [min((rank + 1) * chunk, size) - min(rank * chunk, size) for rank in range(count)]


def intersect(mine: Ranges, theirs: Ranges) -> list[tuple[int, int]]:
    """Parts of `mine` that lie in `theirs`, in the order of `mine`."""
    found = []
    for start, stop in mine:
        for low, high in theirs:
            first, last = max(start, low), min(stop, high)
            if first < last:
                found.append((first, last))
    return found


def local_offset(ranges: Ranges, index: int) -> int:
    """Returns the place of the global `index` in the local tensor that holds `ranges`."""
    at = 0
    for start, stop in ranges:
        if start <= index < stop:
            return at + index - start
        at += stop - start
    raise IndexError(index)


def divides(state: State, size: int) -> bool:
    """True if a dim of `size` can be cut by `state` at all: whole groups, whole units."""
    if state.units is not None:
        total = sum(state.units)
        return total > 0 and all(size * unit % total == 0 for unit in state.units)
    return size % state.groups == 0
