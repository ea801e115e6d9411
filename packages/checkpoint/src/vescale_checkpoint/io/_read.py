"""Carries out a load plan: reads in parallel, checks every block it uses, and copies into the tensors' memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from vescale_dtensor.engine import local_only

from .._errors import CorruptError
from .._torch_private import _foreach_copy_
from ..format._box import Piece, span
from ..format._dtypes import DTYPES
from ..manifest import FileInfo
from ..plan._catalogue import local_of
from ..plan._load_plan import Part, Target, grouped
from ._memory import block_checks, bytes_of, hexadecimal, view_of
from ._storage import Reader, Storage, guarded

_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))  # beside other ranks of the machine


_UNTOUCHED = {
    "load": ("load an earlier step", "nothing was loaded from this one"),
    "save": ("save again", "nothing was committed: the steps that were there before are as they were"),
}

_dim, _size = Tensor.dim, Tensor.size  # a DTensor's own are Python


class Destination(NamedTuple):
    """A target's memory, flat; and its bytes where they are CPU memory of the stored dtype."""

    flat: Tensor
    memory: np.ndarray | None


class Files:
    """The data files of one checkpoint, opened once each and checked before anything is read into a tensor."""

    def __init__(
        self, storage: Storage, folder: str, infos: Mapping[str, FileInfo], verify: bool, operation: str = "load"
    ) -> None:
        self._storage, self.folder, self._infos, self._verify = storage, folder, infos, verify
        self._operation = operation
        self._readers: dict[str, Reader] = {}
        self.bytes_read = 0

    def check(self, names: Sequence[str]) -> None:
        """Opens the files, and compares sizes and headers. Raises CorruptError, StorageError; touches no tensor."""
        for name in names:
            reader = self.reader(name)
            info = self._infos[name]
            if reader.nbytes != info.nbytes:
                raise self._corrupt(name, f"{name!r} has {reader.nbytes} bytes, and was written with {info.nbytes}")
            if self._verify and info.header_check:
                header = bytearray(info.header_nbytes)
                self.fill(name, header, 0)
                if f"{crc32c(header):08x}" != info.header_check:
                    rule = f"the header of {name!r} is not the one that was written: altered, or of another checkpoint"
                    raise self._corrupt(name, rule)

    def _corrupt(self, name: str, rule: str) -> CorruptError:
        return CorruptError(self._operation, rule, [f"path  {self.folder}/{name}"], [_UNTOUCHED[self._operation]])

    def reader(self, name: str) -> Reader:
        found = self._readers.get(name)
        if found is None:
            path = f"{self.folder}/{name}"
            try:
                with guarded(self._operation, path, "cannot open the file"):
                    found = self._readers[name] = self._storage.open(path)
            except RuntimeError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    raise self._corrupt(name, f"the file {name!r} is missing") from error
                raise
        return found

    def fill(self, name: str, buffer: Any, start: int) -> None:
        with guarded(self._operation, f"{self.folder}/{name}", f"cannot read {len(buffer)} bytes at {start}"):
            self.reader(name).read_into(buffer, start)
        self.bytes_read += len(buffer)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


def read_all(
    files: Files, plan: Mapping[str, Sequence[Part]], targets: Sequence[Target],
    memories: Sequence[Tensor], block: int, verify: bool, touched: set[int] | None = None,
) -> None:  # fmt: skip
    """Fills the targets' memories, tensors that are contiguous on this rank; without memories it verifies only.

    Raises CorruptError that names the tensor and the block; `touched` then has the places of the targets that are
    overwritten, wholly or in part.
    """
    work = [(name, group) for name, parts in plan.items() for group in grouped(parts)]
    run = _Run(files, targets, memories, block, verify, set() if touched is None else touched)
    if _THREADS == 1 or len(work) < 2 * _THREADS:
        for item in work:
            run.fetch(*item)
        return
    with ThreadPoolExecutor(_THREADS, "vescale-checkpoint-read") as pool:
        waiting = [pool.submit(run.fetch_all, work[i::_THREADS]) for i in range(_THREADS)]
        try:
            for future in waiting:
                future.result()
        except BaseException:
            run.stopped = True
            raise


class _Run:
    def __init__(
        self, files: Files, targets: Sequence[Target], memories: Sequence[Tensor], block: int, verify: bool,
        touched: set[int],
    ) -> None:  # fmt: skip
        self.files, self.targets, self.memories, self.touched = files, targets, memories, touched
        self.block, self.verify, self.stopped = block, verify, False
        self._destinations: dict[int, Destination] = {}

    def fetch_all(self, work: Sequence[tuple[str, list[Part]]]) -> None:
        for item in work:
            if self.stopped:
                return
            self.fetch(*item)

    def fetch(self, name: str, group: list[Part]) -> None:
        first = group[0]
        memory = self._destination(first.target).memory if self.memories and len(group) == 1 else None
        if memory is not None and first.is_direct:
            self.touched.add(first.target)
            into = memory[first.run[2] : first.run[2] + first.stop - first.start]
            self.files.fill(name, into, first.start)
            self._check(first, into)
            return
        start, stop = first.start, max(part.stop for part in group)
        buffer = np.empty(stop - start, dtype=np.uint8)
        self.files.fill(name, buffer, start)
        view = memoryview(buffer)
        if self.verify:
            self._check_all(group, view, start)
        if not self.memories:
            return
        self.touched.update([part.target for part in group])
        with local_only():
            runs = [(dtype, list(run)) for (dtype, *_), run in groupby(group, key=self._kind)]
        for dtype, run in runs:
            if dtype is not None:
                self._unpack(run, buffer, start, dtype)
                continue
            for part in run:
                self._place(part, buffer, start)

    def _destination(self, target: int) -> Destination:
        found = self._destinations.get(target)
        if found is None:
            flat = local_of(self.memories[target]).view(-1)
            plain = flat.device.type == "cpu" and self.targets[target].dtype == self.targets[target].stored.dtype
            found = self._destinations[target] = Destination(flat, bytes_of(flat) if plain else None)
        return found

    def _kind(self, part: Part) -> tuple[str | None, torch.device | None]:
        """Returns the key by which whole tensors are unpacked together; None for those placed by themselves."""
        if not part.is_whole:
            return None, None
        return self.targets[part.target].dtype, self.memories[part.target].device

    def _unpack(self, run: list[Part], buffer: np.ndarray, start: int, dtype: str) -> None:
        """Copies neighbours that are whole tensors of one dtype out of a buffer, without a view of each in Python."""
        if any(part.stop != after.start for part, after in pairwise(run)):
            for part in run:
                self._place(part, buffer, start)
            return
        into = [self.memories[part.target] for part in run]
        data = _typed(buffer[run[0].start - start : run[-1].stop - start], DTYPES[dtype])
        counts = [(part.stop - part.start) // data.itemsize for part in run]
        with local_only(), torch.no_grad():
            split = torch.unsafe_split_with_sizes(data.to(into[0].device), counts)
            values = [part if _dim(tensor) == 1 else part.view(_size(tensor)) for part, tensor in zip(split, into)]
            _foreach_copy_(into, values)

    def _check_all(self, group: list[Part], view: memoryview, start: int) -> None:
        """Each part's checksums; of small whole sections, which are most of many, all at once."""
        block = self.block
        if all(part.is_whole and part.stop - part.start <= block for part in group):
            found = hexadecimal([crc32c(view[part.start - start : part.stop - start]) for part in group])
            if found == "".join([part.section.checks for part in group]):
                return
        for part in group:
            self._check(part, view[part.start - start : part.stop - start])

    def _check(self, part: Part, data: Any) -> None:
        section, block = part.section, self.block
        if not self.verify or not section.checks:
            return
        low, high = part.start - section.start, part.stop - section.start
        wanted = section.checks[8 * (low // block) : 8 * -(-high // block)]
        found = block_checks(data, block)
        if found != wanted:
            first = next(i for i in range(0, len(wanted), 8) if found[i : i + 8] != wanted[i : i + 8])
            bad = low // block + first // 8
            raise CorruptError(
                "load",
                f"block {bad} of {self.targets[part.target].name!r} is not as it was written",
                [f"file  {self.files.folder}/{section.file}, bytes from {section.start + bad * block}"],
                [
                    ("load an earlier step", "tensors of the state may be overwritten by now: `touched` of this error"),
                    ('load(..., verify="first")', "everything is verified before anything is changed: reads twice"),
                ],
            )

    def _place(self, part: Part, buffer: np.ndarray, start: int) -> None:
        flat, memory = self._destination(part.target)
        if part.run is not None:
            low, high, into = part.run
            data = buffer[low - start : high - start]
            if memory is not None:
                memory[into : into + high - low] = data
            else:
                size = flat.element_size()
                flat[into // size : (into + high - low) // size].copy_(_typed(data, flat.dtype))
            return
        _, source, wanted = part.patch
        dtype = DTYPES[self.targets[part.target].stored.dtype]
        low, high = (part.section.start + edge * dtype.itemsize for edge in span(source))
        values = _typed(buffer[low - start : high - start], dtype)
        copy_piece(values, source._replace(offset=0), flat, wanted)


def copy_piece(source: Tensor, from_: Piece, target: Tensor, into: Piece) -> None:
    """Copies a box between two flat memories, converting the dtype where they differ."""
    view_of(target, into).copy_(view_of(source, from_))


def _typed(data: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Bytes as a 1-D tensor; a copy where they are not aligned for the dtype."""
    if data.ctypes.data % dtype.itemsize:
        data = data.copy()
    return torch.from_numpy(data).view(dtype)
