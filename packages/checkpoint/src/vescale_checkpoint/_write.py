"""Writes one rank's file: straight from the tensors' memory, with a checksum per block.

The checksums of one chunk are computed while a thread writes the chunk before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from torch import Tensor

from ._box import Piece, is_contiguous, row_major, shape_of, split, volume, window
from ._catalogue import local_of
from ._errors import StorageError
from ._memory import bytes_of, view_of
from ._storage import Storage, guarded

CHUNK_BYTES = 1 << 20


class Source(NamedTuple):
    """A section's bytes: a piece of a flat local tensor, on any device."""

    flat: Tensor
    piece: Piece


def flat_of(tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor, 1-D; a copy only where it is not contiguous."""
    local = local_of(tensor)
    if not local.is_contiguous() or local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg().contiguous()
    return local.view(-1)


def chunks_of(source: Source) -> Iterator[np.ndarray]:
    """The section's bytes in order, at most CHUNK_BYTES at a time; views of CPU memory wherever they can be."""
    flat, piece = source
    size = flat.element_size()
    if is_contiguous(piece):
        part = flat[piece.offset : piece.offset + volume(piece.box)]
        step = CHUNK_BYTES // size
        if len(part) <= step:
            yield bytes_of(part.cpu())
            return
        for at in range(0, len(part), step):
            yield bytes_of(part[at : at + step].cpu())
        return
    waiting = [piece.box]
    while waiting:
        box = waiting.pop()
        if volume(box) * size > CHUNK_BYTES and volume(box) > 1:
            waiting.extend(reversed(split(box, -(-volume(box) * size // CHUNK_BYTES))))
            continue
        yield bytes_of(view_of(flat, window(piece, box)).cpu().contiguous())


class BlockChecks:
    """CRC-32C of each block of a stream of bytes."""

    def __init__(self, block: int) -> None:
        self._block, self._open, self._filled, self._found = block, 0, 0, []

    def feed(self, data: np.ndarray) -> None:
        at, size = 0, len(data)
        while at < size:
            end = min(size, at + self._block - self._filled)
            self._open = crc32c(data[at:end], self._open)
            self._filled += end - at
            at = end
            if self._filled == self._block:
                self._finish()

    def text(self) -> str:
        if self._filled:
            self._finish()
        return "".join(self._found)

    def _finish(self) -> None:
        self._found.append(f"{self._open:08x}")
        self._open = self._filled = 0


def write_file(storage: Storage, path: str, header: bytes, sources: Sequence[Source], block: int) -> list[str]:
    """Writes and syncs a file of `header` and the sources' bytes; returns each source's block checksums.

    Raises StorageError with the path and the bytes that were to be written.
    """
    total = len(header) + sum(volume(piece.box) * flat.element_size() for flat, piece in sources)
    with guarded("save", path, f"cannot write {total} bytes"):
        writer = storage.create(path)
        try:
            return _write_all(writer, header, sources, block)
        finally:
            writer.close()


def _write_all(writer: Any, header: bytes, sources: Sequence[Source], block: int) -> list[str]:
    checks: list[str] = []
    batch: list[Any] = [header]
    held, under_way = len(header), None
    with ThreadPoolExecutor(1, "vescale-checkpoint-write") as pool:
        try:
            for source in sources:
                flat, piece = source
                count = volume(piece.box)
                if count == len(flat) and count * flat.element_size() <= block and flat.device.type == "cpu":
                    chunk = bytes_of(flat)  # a small tensor, whole
                    checks.append(f"{crc32c(chunk):08x}")
                    batch.append(chunk)
                    held += len(chunk)
                    if held >= CHUNK_BYTES or len(batch) >= 4096:
                        under_way = _hand_over(pool, under_way, writer, batch)
                        batch, held = [], 0
                    continue
                found = BlockChecks(block)
                for chunk in chunks_of(source):
                    found.feed(chunk)
                    batch.append(chunk)
                    held += len(chunk)
                    if held >= CHUNK_BYTES:
                        under_way = _hand_over(pool, under_way, writer, batch)
                        batch, held = [], 0
                checks.append(found.text())
            _hand_over(pool, under_way, writer, batch).result()
        except BaseException:
            if under_way is not None:
                with contextlib.suppress(Exception):  # what raised first is what is told
                    under_way.result()
            raise
    return checks


def _hand_over(pool: ThreadPoolExecutor, under_way: Future | None, writer: Any, batch: list[Any]) -> Future:
    """Starts writing a batch, once the one before it is written."""
    if under_way is not None:
        under_way.result()
    return pool.submit(writer.write, batch)


def staged(sources: Sequence[Source], pool: dict[Any, Tensor]) -> list[Source]:
    """Copies of the sources in CPU memory that `pool` keeps from one save to the next: all that a save must wait for.

    Raises StorageError where the memory for it cannot be had.
    """
    found = []
    by_kind: dict[Any, int] = {}
    for flat, piece in sources:
        by_kind[flat.dtype] = by_kind.get(flat.dtype, 0) + volume(piece.box)
    for dtype, count in by_kind.items():
        if dtype not in pool or len(pool[dtype]) < count:
            pool.pop(dtype, None)
            try:
                pool[dtype] = _host_memory(sources, dtype, count)
            except RuntimeError as error:
                raise StorageError("save", f"no memory for a staging copy of {count} {dtype}: {error}") from error
    used = dict.fromkeys(by_kind, 0)
    for flat, piece in sources:
        at, count = used[flat.dtype], volume(piece.box)
        target = pool[flat.dtype][at : at + count]
        if is_contiguous(piece):
            target.copy_(flat[piece.offset : piece.offset + count])
        else:
            target.view(shape_of(piece.box)).copy_(view_of(flat, piece))
        used[flat.dtype] += count
        found.append(Source(target, Piece(piece.box, 0, row_major(shape_of(piece.box)))))
    return found


def _host_memory(sources: Sequence[Source], dtype: Any, count: int) -> Tensor:
    import torch

    pinned = any(flat.is_cuda for flat, _ in sources)
    return torch.empty(count, dtype=dtype, pin_memory=pinned)
