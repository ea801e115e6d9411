"""Pairs this rank's rows with columns of blocks, and finds the blocks that nobody needs to send. Pure.

Rows are places of queries, columns places of keys. Each rank holds ranges of both. Under a causal mask row p sees the
columns up to p, so that a range of rows and one of columns make at most two tiles that any row sees: columns that all
rows see, and a triangle whose corner is the diagonal. No tile needs a mask of places.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .._layouts.region import Ranges


class Tile(NamedTuple):
    """Half-open ranges of local rows, of the block's local columns, and of the columns' places; whether it is a
    triangle: row i of the tile sees its columns up to i; whether a described mask hides nothing of it."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    places: tuple[int, int]
    triangle: bool = False
    clear: bool = False


@lru_cache(maxsize=16384)
def tiles(rows: Ranges, columns: Ranges, causal: bool) -> tuple[Tile, ...]:
    """The tiles of one rank's rows and one block's columns in which any row sees any column."""
    found: list[Tile] = []
    row = 0
    for first, last in rows:
        column = 0
        for start, stop in columns:
            found.extend(_pair(first, last, row, start, stop, column, causal))
            column += stop - start
        row += last - first
    return _joined(found)


def _pair(first: int, last: int, row: int, start: int, stop: int, column: int, causal: bool):
    """Tiles of rows [first, last), which lie at local `row`, and columns [start, stop), which lie at `column`."""
    if first >= last or start >= stop:
        return
    if not causal:
        yield Tile((row, row + last - first), (column, column + stop - start), (start, stop))
        return
    corner = max(start, first)  # all rows see the columns before it
    if stop <= first + 1:
        yield Tile((row, row + last - first), (column, column + stop - start), (start, stop))
        return
    if start < corner:
        yield Tile((row, row + last - first), (column, column + corner - start), (start, corner))
    end = min(stop, last)
    if corner < end:
        at = row + corner - first
        yield Tile((at, row + last - first), (column + corner - start, column + end - start), (corner, end), True)


def _joined(found: list[Tile]) -> tuple[Tile, ...]:
    """Neighbours that are one rectangle as one tile: fewer kernels."""
    out: list[Tile] = []
    for tile in found:
        last = out[-1] if out else None
        if last and not last.triangle and not tile.triangle and last.rows == tile.rows and _follow(last, tile):
            columns, places = (last.columns[0], tile.columns[1]), (last.places[0], tile.places[1])
            out[-1] = Tile(last.rows, columns, places)
        else:
            out.append(tile)
    return tuple(out)


def _follow(one: Tile, next: Tile) -> bool:
    return one.columns[1] == next.columns[0] and one.places[1] == next.places[0]


@lru_cache(maxsize=4096)
def needs(rows: tuple[Ranges, ...], columns: tuple[Ranges, ...], causal: bool) -> tuple[tuple[bool, ...], ...]:
    """[rank][block]: whether a rank's rows see any column of a block."""
    return tuple(tuple(bool(tiles(mine, block, causal)) for block in columns) for mine in rows)
