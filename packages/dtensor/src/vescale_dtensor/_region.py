"""Regions: which index ranges of a dim each rank of an axis holds. Pure geometry.

A cut of a dim of `size` over `count` ranks is, per rank, a tuple of half-open
ranges in the order in which the local tensor holds them. A plain shard has one
range per rank, an interleaved one has one per group. The local size is the sum
of their lengths; the ranges of all ranks partition the dim.
"""

from __future__ import annotations

from functools import lru_cache

from ._state import State

Ranges = tuple[tuple[int, int], ...]


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
    chunk = -(-group // count)  # torch.chunk: the first ranks get the ceiling, the last ones what is left
    return tuple(
        tuple(
            (g * group + min(rank * chunk, group), g * group + min((rank + 1) * chunk, group))
            for g in range(state.groups)
        )
        for rank in range(count)
    )


@lru_cache(maxsize=65536)
def cut_sizes(state: State, size: int, count: int) -> tuple[int, ...]:
    """How many indices of a dim of `size` each of `count` ranks holds. Does not list the ranges: groups can be many."""
    if state.units is not None:
        return tuple(stop - start for ((start, stop),) in cut(state, size, count))
    return tuple(state.groups * length for length in chunks(size // state.groups, count))


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
    """Where the global `index` lies in the local tensor that holds `ranges`."""
    at = 0
    for start, stop in ranges:
        if start <= index < stop:
            return at + index - start
        at += stop - start
    raise IndexError(index)


def divides(state: State, size: int) -> bool:
    """Whether a dim of `size` can be cut by `state` at all: whole groups, whole units."""
    if state.units is not None:
        total = sum(state.units)
        return total > 0 and all(size * unit % total == 0 for unit in state.units)
    return size % state.groups == 0
