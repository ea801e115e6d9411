"""The load plan: which bytes of which files a rank reads, and where they go. Pure.

For each piece that a rank needs and each section that holds some of it, the boxes
are intersected. Where both sides hold the intersection without gaps it is a `Run` of
bytes, cut at checksum blocks into reads that land in the tensor itself; otherwise a
`Patch`, copied box to box out of a buffer. Reads that lie next to each other in a
file become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..format._box import Box, Piece, intersect, is_contiguous, span, split, stored, volume, window
from ..format._dtypes import SIZES
from ..manifest import Section, Stored

READ_BYTES = 1 << 20  # of one read: large enough for any disk, small enough to be checked out of the cache
_WHOLE_BYTES = 16 << 10  # of a tensor that is copied out of a buffer with its neighbours
_GAP_BYTES = 32 << 10  # reading over a gap of this size costs less than a second read


class Target(NamedTuple):
    """One tensor to fill: its name in the state and as it is stored, its stored form, where this rank wants it (pieces
    of a flat memory), and the dtype there."""

    name: str
    source: str
    stored: Stored
    pieces: Sequence[Piece]
    dtype: str


class Part(NamedTuple):
    """Bytes [start, stop) of a file, whole blocks of one section, and what of them goes into one target.

    `run`: (first byte wanted, one past the last, byte in the target's memory) where the
    bytes go over as they are; else `patch`: (box, piece of the section, piece of the target).
    `is_whole`: a small section that is all of the target's memory.
    """

    start: int
    stop: int
    section: Section
    target: int
    run: tuple[int, int, int] | None
    patch: tuple[Box, Piece, Piece] | None
    is_whole: bool = False

    @property
    def is_direct(self) -> bool:
        """True if the bytes can be read straight into the target's memory."""
        return self.run is not None and self.run[0] == self.start and self.run[1] == self.stop


def plan_reads(targets: Sequence[Target], block: int) -> dict[str, list[Part]]:
    """File -> parts in the order of their bytes. `block`: the manifest's; 1 for files without checksums."""
    files: dict[str, list[Part]] = {}
    dense: dict[int, bool] = {}  # by the identity of pieces, which tensors of one layout share
    for index, target in enumerate(targets):
        size = SIZES[target.stored.dtype]
        plain = target.dtype == target.stored.dtype
        sections = target.stored.sections
        for piece in target.pieces:
            box = piece.box
            is_dense = dense.get(id(piece))
            if is_dense is None:
                is_dense = dense[id(piece)] = is_contiguous(piece)
            if plain and is_dense and len(sections) == 1 and sections[0].box == box:
                (section,) = sections
                count, into = section.stop - section.start, piece.offset * size
                if count <= READ_BYTES:
                    run = (section.start, section.stop, into)
                    is_whole = len(target.pieces) == 1 and not into and count <= _WHOLE_BYTES
                    files.setdefault(section.file, []).append(
                        Part(section.start, section.stop, section, index, run, None, is_whole)
                    )
                    continue
            for section in sections:
                inner = box if section.box == box else intersect(box, section.box)
                if inner is None:
                    continue
                source, wanted = window(stored(section.box), inner), window(piece, inner)
                parts = files.setdefault(section.file, [])
                if plain and is_contiguous(source) and is_contiguous(wanted):
                    first, count = source.offset * size, volume(inner) * size
                    parts.extend(_runs(section, index, first, count, wanted.offset * size, block))
                else:
                    parts.extend(_patches(section, index, inner, source, wanted, size, block))
    for parts in files.values():
        parts.sort(key=lambda part: (part.start, part.stop))
    return files


def _runs(section: Section, index: int, first: int, count: int, into: int, block: int) -> Iterable[Part]:
    """A run of bytes of a section: an odd first and last block by themselves, whole blocks between in large reads."""
    last, at, base = first + count, first, section.start
    length = section.stop - section.start
    whole = length if last == length else last // block * block
    step = max(block, READ_BYTES // block * block)
    while at < last:
        low = at // block * block
        if low != at or whole <= at:
            high = min(low + block, length)
        else:
            high = min(at + step, whole)
        end = min(high, last)
        yield Part(base + low, base + high, section, index, (base + at, base + end, into + at - first), None)
        at = end


def _patches(
    section: Section, index: int, box: Box, source: Piece, wanted: Piece, size: int, block: int
) -> Iterable[Part]:
    """A box that is copied out of a buffer, in parts whose bytes fit one."""
    waiting = [box]
    while waiting:
        box = waiting.pop()
        low, high = (edge * size for edge in span(window(source, box)))
        if high - low > READ_BYTES and volume(box) > 1:
            waiting.extend(reversed(split(box, -(-(high - low) // READ_BYTES))))
            continue
        start, stop = low // block * block, min(-(-high // block) * block, section.stop - section.start)
        yield Part(
            section.start + start, section.start + stop, section, index, None,
            (box, window(source, box), window(wanted, box)),
        )  # fmt: skip


def grouped(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts that one read serves: neighbours in the file, at most READ_BYTES together. Direct large ones stay alone."""
    groups: list[list[Part]] = []
    start = stop = 0
    for part in parts:
        alone = part.stop - part.start >= READ_BYTES // 16 and part.is_direct
        near = groups and part.start <= stop + _GAP_BYTES and max(stop, part.stop) - start <= READ_BYTES
        if near and not alone and not _is_alone(groups[-1]):
            groups[-1].append(part)
            stop = part.stop if part.stop > stop else stop
        else:
            groups.append([part])
            start, stop = part.start, part.stop
    return groups


def _is_alone(group: list[Part]) -> bool:
    return len(group) == 1 and group[0].is_direct and group[0].stop - group[0].start >= READ_BYTES // 16
