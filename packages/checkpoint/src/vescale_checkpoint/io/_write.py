"""Writes one rank's file: straight from the tensors' memory, with a checksum per block.

A chunk is written right after its checksums were computed, out of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from vescale_dtensor import InternalError
from vescale_dtensor.engine import local_only

from .._errors import StorageError
from .._torch_private import _flatten_dense_tensors, _unflatten_dense_tensors
from ..format._box import Piece, is_contiguous, row_major, shape_of, split, volume, window
from ..plan._catalogue import local_of
from ._memory import bytes_of, hexadecimal, view_of
from ._storage import Storage, guarded

CHUNK_BYTES = 1 << 20


class Source(NamedTuple):
    """A section's bytes: a piece of a flat local tensor, on any device."""

    flat: Tensor
    piece: Piece

    @property
    def nbytes(self) -> int:
        return volume(self.piece.box) * self.flat.element_size()


class Pack(NamedTuple):
    """Small sections that follow each other: whole local tensors of one dtype, and the bytes of each.

    Joined they are one tensor, which costs one copy, where views of each would cost several calls.
    """

    tensors: list[Tensor]
    sizes: list[int]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def joined(self) -> Tensor:
        if len(self.tensors) == 1:
            return flat_of(self.tensors[0])
        with local_only(), torch.no_grad():
            tensors = self.tensors
            places = [tensor.device for tensor in tensors]
            if len(set(places)) > 1:  # an optimizer's step counts are on the CPU
                parts = {place: _on_cpu([t for t, at in zip(tensors, places) if at == place]) for place in set(places)}
                tensors = [next(parts[place]) for place in places]
            return _flatten_dense_tensors(tensors)


def _on_cpu(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Tensors of one device, copied at once."""
    return iter(_unflatten_dense_tensors(_flatten_dense_tensors(tensors).cpu(), tensors))


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

    def feed(self, data: memoryview) -> None:
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
        return hexadecimal(self._found)

    def _finish(self) -> None:
        self._found.append(self._open)
        self._open = self._filled = 0


def write_file(
    storage: Storage,
    path: str,
    header: bytes,
    sources: Sequence[Source | Pack],
    block: int,
    rest: Callable[[], None] = lambda: None,
) -> str:
    """Writes and syncs a file of `header` and the sources' bytes; returns the checksums of all blocks, in order.

    `rest` is called after each chunk.

    Raises StorageError with the path and the bytes that were to be written.
    """
    total = len(header) + sum(source.nbytes for source in sources)
    with guarded("save", path, f"cannot write {total} bytes"):
        writer = storage.create(path, total)
        try:
            return _write_all(writer, header, sources, block, rest)
        finally:
            writer.close()


def _write_all(
    writer: Any, header: bytes, sources: Sequence[Source | Pack], block: int, rest: Callable[[], None]
) -> str:
    checks: list[str] = []
    batch: list[Any] = [header]
    held = len(header)
    for source in sources:
        if type(source) is Pack:
            data, at, found = memoryview(bytes_of(source.joined().cpu())), 0, []
            for size in source.sizes:
                found.append(crc32c(data[at : at + size]))
                at += size
            if at != len(data):
                raise InternalError("packed tensors are not of the sizes planned", planned=at, found=len(data))
            checks.append(hexadecimal(found))
            batch.append(data)
            held += at
        else:
            stream = BlockChecks(block)
            for chunk in chunks_of(source):
                data = memoryview(chunk)
                stream.feed(data)
                batch.append(data)
                held += len(data)
                if held >= CHUNK_BYTES:
                    writer.write(batch)
                    batch, held = [], 0
                    rest()
            checks.append(stream.text())
        if held >= CHUNK_BYTES:
            writer.write(batch)
            batch, held = [], 0
            rest()
    writer.write(batch)
    return "".join(checks)


def staged(sources: Sequence[Source | Pack], pool: dict[Any, Tensor]) -> list[Source | Pack]:
    """Copies of the sources in CPU memory that `pool` keeps from one save to the next: all that a save must wait for.

    Raises StorageError where the memory for it cannot be had.
    """
    by_kind: dict[Any, int] = {}
    counts = []
    for source in sources:
        first = source.tensors[0] if type(source) is Pack else source.flat
        count = source.nbytes // first.element_size()
        counts.append((first.dtype, count))
        by_kind[first.dtype] = by_kind.get(first.dtype, 0) + count
    pinned = any((source.tensors[0] if type(source) is Pack else source.flat).is_cuda for source in sources)
    for dtype, count in by_kind.items():
        if dtype not in pool or len(pool[dtype]) < count:
            pool.pop(dtype, None)
            try:
                pool[dtype] = torch.empty(count, dtype=dtype, pin_memory=pinned)
            except RuntimeError as error:
                raise StorageError("save", f"no memory for a staging copy of {count} {dtype}: {error}") from error
    used = dict.fromkeys(by_kind, 0)
    found: list[Source | Pack] = []
    for source, (dtype, count) in zip(sources, counts):
        at = used[dtype]
        target = pool[dtype][at : at + count]
        used[dtype] += count
        if type(source) is Pack:
            target.copy_(source.joined())
            found.append(Pack([target], source.sizes))
            continue
        flat, piece = source
        if is_contiguous(piece):
            target.copy_(flat[piece.offset : piece.offset + count])
        else:
            target.view(shape_of(piece.box)).copy_(view_of(flat, piece))
        found.append(Source(target, Piece(piece.box, 0, row_major(shape_of(piece.box)))))
    return found
