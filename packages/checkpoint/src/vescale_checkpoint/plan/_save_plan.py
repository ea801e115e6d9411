"""The save plan: which rank writes what. A pure function of the catalogue and the rank.

No rank needs to know what another one writes to know its own part. A shard that k
ranks hold alike is written once: a large one is cut into k parts, one each; small
ones go, in the catalogue's order, to whichever of the k has the fewest bytes so far.
Every rank of such a group computes the same assignment.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ..format._box import Box, Piece, full_box, is_contiguous, pieces_of, shape_of, split, stored, volume, window
from ..format._dtypes import SIZES, header_entry
from ._catalogue import Entry, Holder

SPLIT_BYTES = 1 << 20  # the smallest part that a shard is cut into for its replicas
_BLOCK_BYTES = (64 << 10, 256 << 10)
_MANY_BLOCKS = 4 << 10
_MOST_BLOCKS = 1 << 20
_ALIGNMENT = 64
_WIDEST_STEP = 18  # digits
_ORDER = {name: i for i, name in enumerate(sorted(SIZES, key=lambda name: -SIZES[name]))}


class Write(NamedTuple):
    """One section that this rank writes: a box of `entry`, and where this rank's memory holds it.

    `is_whole`: whether that memory holds nothing else.
    """

    entry: Entry
    piece: Piece
    is_whole: bool = False

    @property
    def nbytes(self) -> int:
        return volume(self.piece.box) * SIZES[self.entry.dtype]


def plan_writes(entries: Sequence[Entry], rank: int) -> list[Write]:
    """Returns what `rank` writes: sections in the file's order, larger dtypes first, so that all are aligned."""
    loads: dict[tuple, list[tuple[int, int]]] = {}
    shares: dict[tuple, tuple] = {}
    found = []
    for entry in entries:
        holder = entry.holders[0]
        if rank not in holder.ranks:
            continue
        key = (holder.layout, entry.shape, id(holder.ranks))
        share = shares.get(key)
        if share is None:
            share = shares[key] = _share(holder, rank, entry.shape)
        group, replica, count, pieces, is_whole = share
        if count == 1:
            found.extend([Write(entry, piece, is_whole) for piece in pieces])
            continue
        if not pieces:
            continue
        heap = loads.get(group)
        if heap is None:
            heap = loads[group] = [(0, i) for i in range(count)]
        size = SIZES[entry.dtype]
        for piece in pieces:
            for part in _assigned(piece, size, count, replica, heap):
                found.append(Write(entry, part, is_whole and part is piece))
    found.sort(key=lambda write: _ORDER[write.entry.dtype])
    return found


def held_by(entry: Entry, rank: int) -> Sequence[Piece]:
    """Returns the pieces of a tensor that a rank holds, whoever writes them."""
    return _share(entry.holders[0], rank, entry.shape)[3]


def _assigned(piece: Piece, size: int, count: int, replica: int, heap: list[tuple[int, int]]) -> list[Piece]:
    """The parts of a piece, held by `count` replicas, that `replica` writes."""
    nbytes = volume(piece.box) * size
    if nbytes < 2 * SPLIT_BYTES:
        load, writer = heap[0]
        heapq.heapreplace(heap, (load + nbytes, writer))
        return [piece] if writer == replica else []
    parts = split(piece.box, min(count, nbytes // SPLIT_BYTES))
    if len(parts) == count:  # one each: the loads stay as they are to each other
        return [window(piece, parts[replica])]
    mine = []
    for part in parts:
        load, writer = heap[0]
        heapq.heapreplace(heap, (load + volume(part) * size, writer))
        if writer == replica:
            mine.append(window(piece, part))
    return mine


def _share(holder: Holder, rank: int, shape: tuple[int, ...]) -> tuple[tuple, int, int, Sequence[Piece], bool]:
    """The replicas that hold what `rank` holds, as a key; its place among them; their number; the pieces; and whether
    they are one, which is all of the rank's memory."""
    place = holder.ranks.index(rank)
    layout = holder.layout
    if layout is None:
        return (holder.ranks,), place, len(holder.ranks), [stored(full_box(shape))] if prod(shape) else [], True
    coordinate = coordinate_of(layout.mesh.sizes, place)
    replica, count, fixed = 0, 1, []
    for axis, (state, size) in enumerate(zip(layout.states, layout.mesh.sizes)):
        if state.is_replicated:
            replica = replica * size + coordinate[axis]
            count *= size
        else:
            fixed.append((axis, coordinate[axis]))
    pieces = pieces_of(layout, coordinate)
    is_whole = len(pieces) == 1 and not pieces[0].offset and is_contiguous(pieces[0])
    return (holder.ranks, tuple(fixed)), replica, count, pieces, is_whole


def coordinate_of(sizes: Sequence[int], place: int) -> tuple[int, ...]:
    """The mesh coordinate of a place in row-major order."""
    found = []
    for size in reversed(sizes):
        found.append(place % size)
        place //= size
    return tuple(reversed(found))


def block_bytes(total: int) -> int:
    """Bytes under one checksum, for a checkpoint of `total` bytes: 64 KiB, 256 KiB from 1 GiB, more beyond 256 GiB."""
    block, usual = _BLOCK_BYTES
    while (total >= 2 * block * _MANY_BLOCKS and block < usual) or total > block * _MOST_BLOCKS:
        block *= 2
    return block


def section_name(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Returns a section's name in its safetensors file: the tensor's, with the box unless it is all of it."""
    if box == full_box(shape):
        return name
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


class Header:
    """The safetensors header of a file of these sections. `starts`: where each begins, behind the header."""

    def __init__(self, writes: Sequence[Write]) -> None:
        fields: dict[str, object] = {}
        self.starts: list[int] = []
        at = 0
        for write in writes:
            entry, box = write.entry, write.piece.box
            code, shape = header_entry(entry.dtype, shape_of(box))
            end = at + write.nbytes
            fields[section_name(entry.name, box, entry.shape)] = {
                "dtype": code, "shape": shape, "data_offsets": (at, end),
            }  # fmt: skip
            self.starts.append(at)
            at = end
        self._fields, self.data_nbytes = json.dumps(fields, separators=(",", ":"))[1:], at
        self.nbytes = -(-len(self._text("9" * _WIDEST_STEP, "0" * 16)) // _ALIGNMENT) * _ALIGNMENT

    def to_bytes(self, step: int, identity: str) -> bytes:
        """Padded: `nbytes` long whatever the step is."""
        text = self._text(str(step), identity)
        return (self.nbytes - 8).to_bytes(8, "little") + text[8:].ljust(self.nbytes - 8)

    def _text(self, step: str, identity: str) -> bytes:
        about = json.dumps({"format": "pt", "vescale-checkpoint": identity, "step": step}, separators=(",", ":"))
        return f'{"":8}{{"__metadata__":{about}{"," if self.starts else ""}{self._fields}'.encode()
