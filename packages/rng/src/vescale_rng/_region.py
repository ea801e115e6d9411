"""Region: what one rank holds of a sequence of random numbers. Pure geometry.

One device fills a tensor in the order of its memory. So the global tensor is seen
with its dims in that order, as a sequence of `numel` places; a shard is, per dim,
some index ranges of it. `pieces` says which places of an interval of the sequence
are the shard's, and where they go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

Ranges = tuple[tuple[int, int], ...]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """A box of places: `shape` of them, at `start` of the sequence, at `corner` of the shard."""

    shape: tuple[int, ...]
    start: int
    corner: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """Global `sizes`, outermost dim first, and per dim the index ranges held, in the order of the shard."""

    sizes: tuple[int, ...]
    ranges: tuple[Ranges, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
        return tuple(_length(ranges) for ranges in self.ranges)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of the sequence, per dim."""
        return tuple(prod(self.sizes[dim + 1 :]) for dim in range(len(self.sizes)))

    @property
    def is_full(self) -> bool:
        return all(ranges == ((0, size),) for size, ranges in zip(self.sizes, self.ranges))

    def joined(self) -> Region:
        """The same places in fewer dims: one that is held whole belongs to the dim around it."""
        sizes: list[int] = []
        ranges: list[Ranges] = []
        for size, held in zip(self.sizes, self.ranges):
            if sizes and held == ((0, size),):
                sizes[-1] *= size
                ranges[-1] = tuple((start * size, stop * size) for start, stop in ranges[-1])
            else:
                sizes.append(size)
                ranges.append(held)
        return Region(tuple(sizes), tuple(ranges))

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The shard's places in the interval [start, stop) of the sequence; `Piece.start` counts from 0."""
        strides = self.strides
        for box in boxes(self.sizes, start, stop):
            for part in _products([_held(held, *span) for held, span in zip(self.ranges, box)]):
                yield Piece(
                    tuple(last - first for first, last, _ in part),
                    sum(first * stride for (first, _, _), stride in zip(part, strides)),
                    tuple(at for _, _, at in part),
                )


def boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[Spans]:
    """An interval of a row-major sequence as boxes, index spans per dim, at most two per dim and one."""
    if start >= stop:
        return
    if not sizes:
        yield ()
        return
    inner = prod(sizes[1:])
    row, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if head:
        end = min(inner, stop - row * inner)
        yield from (((row, row + 1), *box) for box in boxes(sizes[1:], head, end))
        row += 1
    if row < last:
        yield ((row, last), *((0, size) for size in sizes[1:]))
    if tail and row <= last:
        yield from (((last, last + 1), *box) for box in boxes(sizes[1:], 0, tail))


def _held(held: Ranges, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Returns the held part of the indices [start, stop), as (first, last, local index)."""
    found, at = [], 0
    for low, high in held:
        first, last = max(start, low), min(stop, high)
        if first < last:
            found.append((first, last, at + first - low))
        at += high - low
    return found


def _products(choices: list[list]) -> Iterator[tuple]:
    if not choices:
        yield ()
        return
    for one in choices[0]:
        for rest in _products(choices[1:]):
            yield (one, *rest)


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)
