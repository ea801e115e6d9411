"""Counts this rank's attention in a ring: pairs of a row and a column, for benchmarks and tests of balance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .tiles import Tile

_listening: list[list[int]] = []


@contextmanager
def counted_pairs() -> Iterator[list[int]]:
    """While it runs, the pairs of each tile that a ring computes, forward and backward, are appended to the list."""
    found: list[int] = []
    _listening.append(found)
    try:
        yield found
    finally:
        _listening.remove(found)


def count(tile: Tile) -> None:
    if _listening:
        pairs = pairs_of(tile)
        for found in _listening:
            found.append(pairs)


def pairs_of(tile: Tile) -> int:
    rows, columns = tile.rows[1] - tile.rows[0], tile.columns[1] - tile.columns[0]
    if not tile.triangle:
        return rows * columns
    full = max(0, rows - columns)  # rows that see all columns
    short = rows - full
    return full * columns + short * (short + 1) // 2
