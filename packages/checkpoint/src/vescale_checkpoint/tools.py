"""Offline work on committed steps, in one process: what `vescale checkpoint` does.

Each function takes a run's directory (its latest step) or one step's, and holds at
most one tensor, or one of the files it writes, in memory.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from crc32c import crc32c
from torch import Tensor

from . import manifest
from ._errors import CheckpointError, MismatchError, StorageError
from .format._box import Box, Piece, full_box, split, stored, volume
from .format._dtypes import DTYPES, SIZES
from .format._step import step_number
from .format._text import printable as printable
from .format._text import shown as shown
from .huggingface import FullTensor, Places, in_parts, write_folder
from .io._commit import Root
from .io._huggingface import read_folder
from .io._locks import leased
from .io._read import Files, read_all
from .io._source import Source, check_folder, locate, read_manifest
from .io._storage import guarded, storage_of
from .io._write import BlockChecks, write_file
from .io._write import Source as Bytes
from .manifest import FileInfo, Manifest, Section, Stored
from .plan._catalogue import Entry
from .plan._load_plan import Target, plan_reads
from .plan._save_plan import Header, Write, block_bytes

Progress = Callable[[int], None]
_CHUNK_BYTES = 8 << 20
_NO_WEIGHTS = {"$optimizer", "$state"}


@contextmanager
def opened(path: str | os.PathLike[str], step: int | None = None) -> Iterator[Source]:
    """A committed step, kept from deletion within the block. Raises StorageError, CorruptError, FormatError."""
    storage, _ = storage_of(path, "open")
    folder = locate(path, None if step is None else step_number("open", step))
    with leased(storage, folder) as there:
        if not there:
            raise StorageError("open", "the step vanished while it was opened", [f"path  {folder}"])
        kept = manifest.parse(read_manifest(storage, folder), f"{folder}/{manifest.NAME}")
        check_folder(kept, folder)
        yield Source(storage, folder, kept)


def verify(source: Source, progress: Progress = lambda nbytes: None) -> list[str]:
    """Reads every byte of a step; what is wrong with it, a line each. Empty: it is whole."""
    found = []
    listed = {*source.manifest.files, manifest.NAME}
    with guarded("verify", source.folder, "cannot list the directory"):
        names = source.storage.names(source.folder)
    found += [printable(f"{name}: is not of this checkpoint") for name in names if name not in listed]
    for file, sections in sections_by_file(source.manifest).items():
        try:
            found += file_faults(source, file, sections, progress)
        except CheckpointError as error:
            found.append(printable(f"{file}: {error.rule}"))
    return found


def sections_by_file(kept: Manifest) -> dict[str, list[tuple[str, Section]]]:
    """The sections of each file, each with its tensor's name."""
    found: dict[str, list[tuple[str, Section]]] = {name: [] for name in kept.files}
    for name, tensor in kept.tensors.items():
        for section in tensor.sections:
            found[section.file].append((name, section))
    return found


def file_faults(
    source: Source, file: str, sections: Sequence[tuple[str, Section]], progress: Progress = lambda nbytes: None
) -> Iterator[str]:
    """Reads every byte of a file of a step; a line for each block that is wrong. Raises CheckpointError."""
    files = Files(source.storage, source.folder, source.manifest.files, verify=True)
    block = source.manifest.block_bytes
    try:
        files.check([file])
        progress(source.manifest.files[file].header_nbytes)
        for name, section in sections:
            found = BlockChecks(block)
            for at in range(section.start, section.stop, _CHUNK_BYTES):
                data = bytearray(min(_CHUNK_BYTES, section.stop - at))
                files.fill(file, data, at)
                found.feed(memoryview(data))
                progress(len(data))
            checks = found.text()
            for i in range(0, len(checks), 8):
                if checks[i : i + 8] != section.checks[i : i + 8]:
                    yield printable(f"{file}: block {i // 8} of {name!r} is not as it was written")
    finally:
        files.close()


def read_tensor(source: Source, name: str, box: Box | None = None) -> Tensor:
    """A stored tensor, or a box of it, in CPU memory."""
    kept = source.manifest.tensors[name]
    box = full_box(kept.shape) if box is None else box
    target = Target(name, name, kept, (stored(box),) if volume(box) else (), kept.dtype)
    block = source.manifest.block_bytes
    files = Files(source.storage, source.folder, source.manifest.files, verify=True)
    try:
        plan = plan_reads([target], block)
        files.check(sorted(plan))
        tensor = _empty([stop - start for start, stop in box], kept.dtype)
        read_all(files, plan, [target], [tensor], block, verify=True)
    finally:
        files.close()
    return tensor


def _empty(shape: Sequence[int], dtype: str) -> Tensor:
    try:
        return torch.empty(shape, dtype=DTYPES[dtype])
    except RuntimeError as error:
        raise StorageError("read", f"no memory for a tensor of {dtype}{list(shape)}: {error}") from error


@dataclass(frozen=True)
class Difference:
    """Difference of one tensor, or of the values: `what` says it in words. Both are fit to be printed."""

    name: str
    what: str


def diff(a: Source, b: Source, progress: Progress = lambda nbytes: None) -> list[Difference]:
    """Every tensor that differs between two steps, bit for bit, whatever their sharding; and the other values."""
    found = []
    for name in sorted({*a.manifest.tensors, *b.manifest.tensors}):
        mine, theirs = a.manifest.tensors.get(name), b.manifest.tensors.get(name)
        if mine is None or theirs is None:
            where = "only in the second" if mine is None else "only in the first"
            found.append(Difference(printable(name), where))
        elif (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            kinds = (f"{tensor.dtype}{list(tensor.shape)}" for tensor in (mine, theirs))
            found.append(Difference(printable(name), " and ".join(kinds)))
        else:
            what = _differing(read_tensor(a, name), read_tensor(b, name))
            found += [Difference(printable(name), what)] if what else []
            progress(mine.nbytes)
    found += [
        Difference(printable(path), f"{mine} and {theirs}")
        for path, mine, theirs in _differing_values(a.manifest.values, b.manifest.values, "")
    ]
    return found


def _differing(x: Tensor, y: Tensor) -> str | None:
    bits = [tensor.view(-1).view(torch.uint8).view(-1, tensor.element_size()) for tensor in (x, y)]
    changed = (bits[0] != bits[1]).any(1)
    if not changed.any():
        return None
    largest = (x.double() - y.double()).abs().max().item() if x.is_floating_point() else None
    tail = "" if largest is None else f", by at most {largest:.3g}"
    return f"{int(changed.sum())} of {x.numel()} elements{tail}"


def _differing_values(a: object, b: object, path: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from _differing_values(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    elif json.dumps(a) != json.dumps(b):
        yield path, shown(a, 60), shown(b, 60)


def export(
    source: Source, out: str | os.PathLike[str], key: str = "model", progress: Progress = lambda nbytes: None,
    places: Places | None = None, finish: Callable[[str], None] = lambda folder: None,
) -> None:  # fmt: skip
    """Writes the tensors under `key` as a HuggingFace folder, tied ones once.

    Arguments:
        places: as for `export_huggingface`.
        finish: is given the folder before it is committed, to write beside the weights.

    Raises MismatchError where there are none, or where they are an optimizer's; ConflictError where the folder exists.
    The model's configuration is not in a checkpoint: `finish` may put its config.json there.
    """
    prefix = f"{key}."
    _check_weights(source, key)
    tensors = [
        FullTensor(name[len(prefix) :], kept.dtype, kept.shape, partial(read_tensor, source, name))
        for name, kept in source.manifest.tensors.items()
        if name.startswith(prefix)
    ]
    parts = [one for whole in tensors for one in in_parts(whole, (places or {}).get(whole.name))]
    write_folder(out, parts, finish, progress=progress)


def exported(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Returns name -> dtype of the tensors in a HuggingFace folder. Reads headers alone.

    Raises StorageError, and FormatError for what is no such folder.
    """
    storage, path = storage_of(folder, "open")
    return {name: kept.dtype for name, kept in read_folder(storage, path, "").tensors.items()}


def _check_weights(source: Source, key: str) -> None:
    """Raises MismatchError unless tensors stand under `key` that are not the state of an optimizer or of an object."""
    values = source.manifest.values if isinstance(source.manifest.values, dict) else {}
    others = [*_without_weights(values)]
    is_other = any(f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.") for one in others)
    if not is_other and any(name.startswith(f"{key}.") for name in source.manifest.tensors):
        return
    what = (
        f"under {key!r} is the state of an optimizer or another object" if is_other else f"no tensors are under {key!r}"
    )
    mixed = {one.partition(".")[0] for one in others}
    held = source.manifest.tensors
    keys = [top for top in values if top not in mixed and any(name.startswith(f"{top}.") for name in held)]
    raise MismatchError(
        "export", f"{what}, and the folder is for a model's weights",
        [f"path  {source.folder}", f"keys with weights  {', '.join(keys[:8]) or 'none'}"],
        [(f"key={one!r}", "") for one in keys[:4]],
    )  # fmt: skip


def _without_weights(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yields the places of optimizers' or objects' states in the values of a state."""
    for key, value in values.items():
        full = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value.keys() & _NO_WEIGHTS:
            yield full
        elif isinstance(value, dict) and next(iter(value), "")[:1] != "$":
            yield from _without_weights(value, full)


def reshard(source: Source, out: str | os.PathLike[str], ranks: int, progress: Progress = lambda nbytes: None) -> str:
    """Writes the step again under another run's directory, as `ranks` ranks would: every tensor cut along its rows.

    Loading does this by itself; it is for readers that want one file each. Returns the step's path.
    """
    if ranks < 1:
        raise MismatchError("reshard", f"{ranks} ranks: at least one is needed")
    kept = source.manifest
    draft = Root(out, "reshard").begin(kept.step, overwrite=False)
    try:
        block = block_bytes(kept.nbytes)
        files: dict[str, FileInfo] = {}
        sections: dict[str, list[Section]] = {name: [] for name in kept.tensors}
        for rank, writes in enumerate(_even(kept, ranks)):
            if not writes:
                continue
            header = Header(writes)
            name = f"{rank:05d}-{draft.identity}.safetensors"
            parts = []
            for write in writes:
                flat = read_tensor(source, write.entry.name, write.piece.box).view(-1)
                parts.append(Bytes(flat, stored(write.piece.box)))
                progress(write.nbytes)
            first = header.to_bytes(kept.step, draft.identity)
            checks, at = write_file(draft.root.storage, f"{draft.path}/{name}", first, parts, block), 0
            for write, start in zip(writes, header.starts, strict=True):
                start, end = len(first) + start, at + 8 * -(-write.nbytes // block)
                section = Section(write.piece.box, name, start, start + write.nbytes, checks[at:end])
                sections[write.entry.name].append(section)
                at = end
            files[name] = FileInfo(len(first) + header.data_nbytes, len(first), f"{crc32c(first):08x}")
        tensors = {
            name: Stored(tensor.dtype, tensor.shape, tuple(sections[name]), tensor.tied)
            for name, tensor in kept.tensors.items()
        }
        about = {**kept.about, "resharded_from": source.folder, "world_size": ranks}
        made = Manifest(kept.step, draft.identity, block, files, tensors, kept.values, about)
        draft.commit(made.to_text())
        return draft.final
    except BaseException:
        draft.discard()
        raise


def _even(kept: Manifest, ranks: int) -> list[list[Write]]:
    """Per file its sections: tensors cut along their first dim, small parts to the file with the fewest bytes."""
    files: list[list[Write]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for name, tensor in kept.tensors.items():
        if not prod(tensor.shape):
            continue
        entry = Entry(name, tensor.dtype, tensor.shape, tensor.tied, (), "")
        for box in split(full_box(tensor.shape), ranks):
            load, rank = heap[0]
            heapq.heapreplace(heap, (load + volume(box) * SIZES[tensor.dtype], rank))
            files[rank].append(Write(entry, Piece(box, 0, stored(box).strides)))
    for writes in files:
        writes.sort(key=lambda write: -SIZES[write.entry.dtype])
    return files
