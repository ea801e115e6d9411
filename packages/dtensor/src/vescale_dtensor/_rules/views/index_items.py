"""Reads an index dim by dim, and finds the part of a dim's indices that a rank holds."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from ..._layouts.layout import Layout
from ..._layouts.region import Ranges
from ..._layouts.state import PARTIAL
from ..._layouts.strides import memory_order


class Item(NamedTuple):
    """An index of one dim: a range of it, one index of it (`drop`), or a new dim (dim None)."""

    dim: int | None
    taken: range = range(1)
    drop: bool = False

    def is_full(self, shape: Sequence[int]) -> bool:
        return self.dim is not None and not self.drop and self.taken == range(shape[self.dim])


class Piece(NamedTuple):
    """A part of a slice that this rank holds: its place in the slice, its length, where it lies locally."""

    position: int
    length: int
    local: slice


def is_basic(index: object) -> bool:
    """True if an index is of integers, slices of integers, None and Ellipsis only."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is None or item is Ellipsis or _is_integer(item)
        or (isinstance(item, slice) and all(b is None or _is_integer(b) for b in (item.start, item.stop, item.step)))
        for item in items
    )  # fmt: skip


def _is_integer(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)


def parse(index: object, shape: Sequence[int]) -> list[Item] | None:
    """A basic index, one item per dim of the tensor and per new dim. None if torch would raise."""
    entries = list(index) if isinstance(index, tuple) else [index]
    missing = len(shape) - sum(entry is not None and entry is not Ellipsis for entry in entries)
    if missing < 0 or entries.count(Ellipsis) > 1:
        return None
    at = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    entries[at : at + 1] = [slice(None)] * missing
    items, dim = [], 0
    for entry in entries:
        if entry is None:
            items.append(Item(None))
            continue
        item = _item(entry, dim, shape[dim])
        if item is None:
            return None
        items.append(item)
        dim += 1
    return items


def _item(entry: object, dim: int, size: int) -> Item | None:
    if isinstance(entry, slice):
        if entry.step is not None and operator.index(entry.step) <= 0:
            return None
        return Item(dim, range(*entry.indices(size)))
    at = operator.index(entry)
    if not -size <= at < size:
        return None
    at %= size
    return Item(dim, range(at, at + 1), True)


def is_alias(layout: Layout, index: object) -> bool:
    """True if a basic index of a tensor of `layout` gives a view of the shards."""
    items = parse(index, layout.shape)
    return items is not None and not any(
        item.dim is not None and not item.is_full(layout.shape) and layout.axes_of(item.dim) for item in items
    )


def pieces(ranges: Ranges, taken: range) -> list[Piece]:
    """Returns the part of the indices `taken` on a rank that holds `ranges` of a dim, by position."""
    found, offset = [], 0
    for low, high in ranges:
        first = max(0, -(-(low - taken.start) // taken.step))
        last = min(len(taken), -(-(high - taken.start) // taken.step))
        if first < last:
            start = offset + taken[first] - low
            found.append(
                Piece(first, last - first, slice(start, start + (last - first - 1) * taken.step + 1, taken.step))
            )
        offset += high - low
    return sorted(found)


def owned(local: Tensor, dim: int, parts: list[Piece], length: int) -> Tensor:
    """`length` indices of a dim: this rank's parts in their places, zeros elsewhere. Connected to `local` always."""
    order = memory_order(local.stride(), local.shape)
    if order is not None:
        back = [order.index(d) for d in range(local.ndim)]
        return owned(local.permute(order), order.index(dim), parts, length).permute(back)
    lead = (slice(None),) * dim
    joined = [] if parts else [local.narrow(dim, 0, 0)]
    at = 0
    for position, count, where in [*parts, Piece(length, 0, slice(0, 0))]:
        if position > at:
            joined.append(local.new_zeros((*local.shape[:dim], position - at, *local.shape[dim + 1 :])))
        if count:
            joined.append(local[(*lead, where)])
        at = position + count
    return joined[0] if len(joined) == 1 else torch.cat(joined, dim)


def as_index(item: Item) -> int | slice | None:
    """The item as it is written in brackets."""
    if item.dim is None:
        return None
    if item.drop:
        return item.taken.start
    return slice(item.taken.start, item.taken.stop, item.taken.step)


def align(shape: Sequence[int], view: Sequence[tuple]) -> tuple | None:
    """Labels of a value that is written to a view of (label, size) dims, under torch's rules for assignment."""
    extra = max(0, len(shape) - len(view))
    if any(size != 1 for size in shape[:extra]):
        return None
    named = [None] * extra
    for size, (label, extent) in zip(shape[extra:], view[len(view) - len(shape) + extra :]):
        if size != extent and size != 1:
            return None
        named.append(label if size == extent else None)
    return tuple(named)


def enters_here(layout: Layout) -> bool:
    """True if a constant enters a tensor of `layout` on this rank: on the first one of each partial axis."""
    return not any(s is PARTIAL and at for s, at in zip(layout.states, layout.mesh.coordinate))
