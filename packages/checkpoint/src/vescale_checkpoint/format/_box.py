"""Box algebra: the one geometry of save plans, load plans and online resharding. Pure.

A box is a half-open index range per dim of a global tensor. A `Piece` is a box
together with where a local tensor holds it: an element offset into its flat
storage, and element strides. What is stored in a file is a piece too, row-major
from offset 0. To move data is always the same: intersect two boxes, address the
intersection in both pieces (`window`), copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from vescale_dtensor import Layout

Box = tuple[tuple[int, int], ...]
MOST_IRREGULAR = 4096  # boxes compared one by one; what plans make are grids, or runs with a few odd ends each


class Piece(NamedTuple):
    """A box of the global tensor, and where a local tensor holds it (in elements)."""

    box: Box
    offset: int
    strides: tuple[int, ...]


def full_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The element strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def stored(box: Box) -> Piece:
    """The piece of a box that lies row-major, by itself."""
    return Piece(box, 0, row_major(shape_of(box)))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part, None if there is none."""
    found = []
    for (start, stop), (low, high) in zip(a, b, strict=True):
        first, last = max(start, low), min(stop, high)
        if first >= last:
            return None
        found.append((first, last))
    return tuple(found)


def without(box: Box, others: Sequence[Box]) -> list[Box]:
    """Returns the part of a box that lies in none of the others, as disjoint boxes."""
    left = [box]
    for other in others:
        left = [rest for one in left for rest in _beside(one, intersect(one, other))]
    return left


def _beside(box: Box, inner: Box | None) -> list[Box]:
    if inner is None:
        return [box]
    found = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, inner)):
        cut = [(start, low), (high, stop)]
        found += [(*inner[:dim], part, *box[dim + 1 :]) for part in cut if part[0] < part[1]]
    return found


def window(piece: Piece, inner: Box) -> Piece:
    """The part `inner` of a piece, in the same memory."""
    offset = piece.offset
    for (start, _), (low, _), stride in zip(inner, piece.box, piece.strides, strict=True):
        offset += (start - low) * stride
    return Piece(inner, offset, piece.strides)


def is_contiguous(piece: Piece) -> bool:
    """True if its elements are contiguous in memory, row-major."""
    step = 1
    for (start, stop), stride in zip(reversed(piece.box), reversed(piece.strides), strict=True):
        if stop - start != 1:
            if stride != step:
                return False
            step *= stop - start
    return True


def span(piece: Piece) -> tuple[int, int]:
    """First element and one past the last that the piece touches in its memory."""
    reach = sum((stop - start - 1) * stride for (start, stop), stride in zip(piece.box, piece.strides, strict=True))
    return piece.offset, piece.offset + reach + 1


def split(box: Box, parts: int) -> list[Box]:
    """Cuts a box into at most `parts` boxes of nearly equal size, along the first dim that has more than one index."""
    for dim, (start, stop) in enumerate(box):
        size = stop - start
        if size > 1:
            count = min(parts, size)
            cuts = [start + size * i // count for i in range(count + 1)]
            return [(*box[:dim], (low, high), *box[dim + 1 :]) for low, high in pairwise(cuts)]
    return [box]


@lru_cache(maxsize=16384)
def pieces_of(layout: Layout, coordinate: tuple[int, ...]) -> tuple[Piece, ...]:
    """Returns the pieces that the rank at a mesh coordinate holds: disjoint, none of them empty.

    A flat ragged shard is 1-D whatever its tensor is: each of its boxes lies row-major
    by itself. Any other shard has the tensor's dims, and a box in it has the shard's strides.
    """
    if not layout.numel:
        return ()
    if layout.flat_axis is not None:
        return tuple(
            Piece(box, offset, row_major(shape_of(box)))
            for box, offset in layout.boxes_at(coordinate)
        )  # fmt: skip
    strides = row_major(tuple(layout.shape_at(coordinate)))
    found = []
    for ranges in product(*(_placed(ranges) for ranges in layout.region_at(coordinate))):
        box = tuple((start, stop) for start, stop, _ in ranges)
        offset = sum(at * stride for (_, _, at), stride in zip(ranges, strides))
        found.append(Piece(box, offset, strides))
    return tuple(found)


def _placed(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Ranges of one dim that are not empty, neighbours joined, each with its place in the local dim."""
    found: list[tuple[int, int, int]] = []
    at = 0
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop, found[-1][2])
        elif stop > start:
            found.append((start, stop, at))
        at += stop - start
    return found


def partition_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Says why boxes are not a partition of a tensor: outside it, overlapping, or not all of it. None if they are."""
    outer = full_box(shape)
    if len(boxes) == 1 and boxes[0] == outer:
        return None if prod(shape) else "it is empty, and has a box"
    for box in boxes:
        if len(box) != len(outer) or any(not 0 <= start < stop <= size for (start, stop), (_, size) in zip(box, outer)):
            return f"the box {box} does not lie in the shape {tuple(shape)}"
    covered, total = sum(map(volume, boxes)), prod(shape)
    if covered != total:
        return f"its boxes hold {covered} elements of {total}"
    try:
        overlap = first_overlap(list(boxes))
    except ValueError as error:
        return str(error)
    return None if overlap is None else f"the boxes {overlap[0]} and {overlap[1]} overlap"


def first_overlap(boxes: list[Box], dim: int = 0) -> tuple[Box, Box] | None:
    """Two boxes with a common element, or None. Near-linear on grids: clusters along one dim are split by the next."""
    if len(boxes) < 2:
        return None
    if dim == len(boxes[0]):
        return boxes[0], boxes[1]
    if len(boxes) == 2:
        return None if intersect(*boxes) is None else (boxes[0], boxes[1])
    boxes.sort(key=lambda box: box[dim])
    cluster, reach = [boxes[0]], boxes[0][dim][1]
    for box in [*boxes[1:], None]:
        if box is not None and box[dim][0] < reach:
            cluster.append(box)
            reach = max(reach, box[dim][1])
            continue
        found = first_overlap(cluster, dim + 1) if len(cluster) > 1 else None
        if found is not None and intersect(*found) is None:
            found = _any_overlap(cluster, dim)
        if found is not None:
            return found
        if box is not None:
            cluster, reach = [box], box[dim][1]
    return None


def _any_overlap(boxes: list[Box], dim: int) -> tuple[Box, Box] | None:
    """Compares neighbours along `dim` one by one: for partitions that are no grid."""
    if len(boxes) > MOST_IRREGULAR:
        raise ValueError(f"{len(boxes)} boxes that overlap along dim {dim} and form no grid")
    boxes = sorted(boxes, key=lambda box: box[dim])
    open_: list[Box] = []
    for box in boxes:
        open_ = [other for other in open_ if other[dim][1] > box[dim][0]]
        for other in open_:
            if intersect(other, box) is not None:
                return other, box
        open_.append(box)
    return None
