"""The part of a save plan that follows from the state's structure alone; reused for later saves of the same state.

A training run saves the same names, shapes and layouts again and again. What differs
is bytes, checksums, the step and the files' names. So each rank keeps its save plan and
its file's header (`Outline`), and rank 0 the manifest's text about the tensors, with gaps
for what differs (`Skeleton`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from vescale_dtensor import InternalError

from ..format._box import Box, partition_fault
from ..io._write import CHUNK_BYTES, Pack, Source, flat_of
from ..manifest import Section, Stored, tensor_parts
from ._catalogue import Entry
from ._save_plan import Header, Write, block_bytes, plan_writes

PACK_BYTES = 16 << 10  # a copy of so much costs less than handling one more tensor by itself
_KEPT = 2  # structures


class Row(NamedTuple):
    """A section as rank 0 is told of it: the tensor's name, the box, the bytes of the file."""

    name: str
    box: Box
    start: int
    stop: int


class Outline:
    """One rank's part of saving one structure. `skeleton` is rank 0's, once a save of it was reported."""

    def __init__(self, entries: Sequence[Entry], rank: int) -> None:
        self.writes = plan_writes(entries, rank)
        self.block = block_bytes(sum(Stored(e.dtype, e.shape, ()).nbytes for e in entries))
        self.header = Header(self.writes)
        self.skeleton: Skeleton | None = None
        self._runs: list[tuple[list[Write], list[int] | None]] = []  # neighbours; of packed ones, the bytes of each
        for (packs, *_), pairs in groupby(zip(self._batches(), self.writes), key=lambda pair: pair[0]):
            run = [write for _, write in pairs]
            self._runs.append((run, [write.nbytes for write in run] if packs else None))

    def _batches(self) -> list[tuple]:
        """Per write whether it is packed, and what is the same for all that are packed together."""
        found, batch, held = [], 0, 0
        for write in self.writes:
            nbytes, dtype = write.nbytes, write.entry.dtype
            packs = write.is_whole and nbytes <= min(PACK_BYTES, self.block) and not dtype.startswith("complex")
            held += nbytes
            if held > CHUNK_BYTES:
                batch, held = batch + 1, nbytes
            found.append((packs, dtype, batch) if packs else (False,))
        return found

    def sources(self, tensors: Mapping[str, Tensor]) -> list[Source | Pack]:
        """Returns what to write, in the file's order, from the tensors' memory."""
        found: list[Source | Pack] = []
        flats: dict[str, Tensor] = {}
        for run, sizes in self._runs:
            if sizes is not None:
                found.append(Pack([tensors[write.entry.name] for write in run], sizes))
                continue
            for write in run:
                name = write.entry.name
                if name not in flats:
                    flats[name] = flat_of(tensors[name])
                found.append(Source(flats[name], write.piece))
        return found

    def rows(self) -> list[Row]:
        """The sections, in the file's order."""
        base = self.header.nbytes
        return [
            Row(write.entry.name, write.piece.box, base + start, base + start + write.nbytes)
            for write, start in zip(self.writes, self.header.starts, strict=True)
        ]


class Skeleton:
    """The manifest's text about the tensors, but for the files' names and the checksums.

    Arguments: the entries, every rank's rows, and the bytes under one checksum.
    """

    def __init__(self, entries: Sequence[Entry], rows: Sequence[Sequence[Row]], block: int) -> None:
        sections: dict[str, list[tuple[Section, tuple[int, int, int]]]] = {entry.name: [] for entry in entries}
        for rank, told in enumerate(rows):
            at = 0
            for name, box, start, stop in told:
                if type(box) is not tuple:  # it came as JSON
                    box = tuple([(low, high) for low, high in box])
                end = at + 8 * -(-(stop - start) // block)
                sections[name].append((Section(box, "", start, stop, ""), (rank, at, end)))
                at = end
        tensors = {}
        for name, dtype, shape, tied, _, _ in entries:
            found = tuple([section for section, _ in sections[name]])
            if (fault := partition_fault(shape, [section.box for section in found])) is not None:
                raise InternalError("the ranks did not write each element once", tensor=name, fault=fault)
            tensors[name] = Stored(dtype, shape, found, tied)
        self._parts = tensor_parts(tensors)
        self._gaps = [gap for found in sections.values() for _, gap in found]

    def text(self, files: Sequence[str], checks: Sequence[str]) -> str:
        """The text: per rank the name of its file, and all of the file's checksums in order."""
        parts = self._parts
        names = [json.dumps(file) for file in files]
        parts[1::4] = [names[rank] for rank, _, _ in self._gaps]
        parts[3::4] = [checks[rank][at:end] for rank, at, end in self._gaps]
        return "".join(parts)


_kept: dict[str, Outline] = {}


def outline_of(key: str, entries: Callable[[], Sequence[Entry]], rank: int) -> Outline:
    """The outline of a structure, from the last few or made now."""
    found = _kept.pop(key, None) or Outline(entries(), rank)
    _kept[key] = found  # the youngest last
    while len(_kept) > _KEPT:
        del _kept[next(iter(_kept))]
    return found


def known_keys() -> list[str]:
    """Keys of the structures whose skeleton rank 0, here, has."""
    return [key for key, outline in _kept.items() if outline.skeleton is not None]
