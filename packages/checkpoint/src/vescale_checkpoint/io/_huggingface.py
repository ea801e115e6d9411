"""HuggingFace folders, read as one more kind of checkpoint.

Reading needs only the files' headers: every tensor is one section, so that each
rank reads the byte ranges of its own shards. The files have no checksums; their
sizes and ranges are checked, and a header is at most 100 MB, as safetensors says.
In the cache of HuggingFace's hub the files are symbolic links, which are followed here,
as everybody who reads such folders does; what is not a regular file is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from typing import Any

from torch import nn

from .._errors import FormatError
from ..format._box import full_box
from ..format._dtypes import FROM_SAFETENSORS, SIZES
from ..format._json import parse_json
from ..format._text import reason_of, shown
from ..manifest import MOST_DIMS, FileInfo, Manifest, Section, Stored, plain_name
from ._storage import Storage, guarded

STEMS = ("model", "adapter_model", "diffusion_pytorch_model")  # how models, PEFT's adapters, and diffusers' are called
END = ".safetensors"
MOST_HEADER_BYTES = 100_000_000
_MOST_REF_BYTES = 256


def is_folder(storage: Storage, folder: str) -> bool:
    """True if a directory holds HuggingFace weights."""
    return _weights(storage, folder) is not None


def _weights(storage: Storage, folder: str) -> str | None:
    """The name of the folder's index, or else of its only file of weights."""
    names = [f"{stem}.safetensors{end}" for stem in STEMS for end in (".index.json", "")]
    return next((name for name in names if storage.exists(f"{folder}/{name}")), None)


def snapshot_of(storage: Storage, folder: str) -> str:
    """The folder of the main snapshot, where `folder` is a model (`models--...`) in the hub's cache; else itself.

    Raises FormatError where the cache does not say which snapshot is meant.
    """
    if not os.path.basename(folder).startswith("models--") or is_folder(storage, folder):
        return folder
    there = storage.names(f"{folder}/snapshots")
    name = there[0] if len(there) == 1 else ""
    if storage.exists(f"{folder}/refs/main"):
        name = storage.read(f"{folder}/refs/main", _MOST_REF_BYTES).decode("utf-8", "replace").strip()
    if name not in there:
        raise FormatError(
            "load", f"the hub's cache does not say which of its {len(there)} snapshots is meant",
            [f"path  {folder}", f"refs/main  {name!r}", *(f"snapshot  {name}" for name in there[:8])],
            [("load(f'{folder}/snapshots/...', ...)", "one of them")],
        )  # fmt: skip
    return f"{folder}/snapshots/{name}"


def read_folder(storage: Storage, folder: str, prefix: str, file: str | None = None) -> Manifest:
    """The manifest of a folder of safetensors, or of one file in it, its names after `prefix`. Reads headers only.

    Raises StorageError, and FormatError for what is no such folder.
    """
    index = file or _weights(storage, folder)
    if index is None:
        raise FormatError("load", "the folder holds no weights of safetensors", [f"path  {folder}"])
    files: dict[str, list[str] | None] = {}
    files |= _indexed(storage, folder, index) if index.endswith(".json") else {index: None}
    infos: dict[str, FileInfo] = {}
    tensors: dict[str, Stored] = {}
    for file, wanted in files.items():
        path = f"{folder}/{file}"
        with guarded("load", path, "cannot read the header"):
            reader = storage.open(path)
            try:
                header, start = _header(reader, path)
            finally:
                reader.close()
        infos[file] = FileInfo(reader.nbytes, start, "")
        found = {name: _stored(entry, file, start, reader.nbytes, path) for name, entry in header.items()}
        _check_tiled(found, start, reader.nbytes, path)
        for name in found if wanted is None else wanted:
            if name not in found:
                raise FormatError(
                    "load", f"{index} says that {name!r} is in {file!r}, and it is not", [f"path  {path}"]
                )
            tensors[prefix + name] = found[name]
    return Manifest(step=0, identity="", block_bytes=1, files=infos, tensors=tensors, values={})


def _indexed(storage: Storage, folder: str, index: str) -> dict[str, list[str]]:
    """File -> the names in it."""
    path = f"{folder}/{index}"
    with guarded("load", path, "cannot read the index"):
        data = storage.read(path, MOST_HEADER_BYTES)
    try:
        files: dict[str, list[str]] = {}
        for name, file in parse_json(data, unique=True)["weight_map"].items():
            files.setdefault(plain_name(file), []).append(name)
        return files
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(
            "load", f"the index is not one of safetensors files: {reason_of(error)}", [f"path  {path}"]
        ) from error


def _header(reader: Any, path: str) -> tuple[dict[str, Any], int]:
    """The header's entries, and where the data begin."""
    length = bytearray(8)
    reader.read_into(length, 0)
    count = int.from_bytes(length, "little")
    if count > min(MOST_HEADER_BYTES, reader.nbytes - 8):
        raise FormatError(
            "load", f"the header says it has {count} bytes, of a file of {reader.nbytes}", [f"path  {path}"]
        )
    text = bytearray(count)
    reader.read_into(text, 8)
    try:
        fields = parse_json(bytes(text), unique=True)
        fields.pop("__metadata__", None)
        return fields, 8 + count
    except (ValueError, TypeError, AttributeError) as error:
        raise FormatError(
            "load", f"the header is not one of safetensors: {reason_of(error)}", [f"path  {path}"]
        ) from error


def _stored(entry: Any, file: str, start: int, nbytes: int, path: str) -> Stored:
    try:
        dtype, shape = FROM_SAFETENSORS[entry["dtype"]], tuple(entry["shape"])
        low, high = entry["data_offsets"]
        sizes = (*shape, low, high)
        fits = len(shape) <= MOST_DIMS and all(type(size) is int and 0 <= size < 1 << 63 for size in sizes)
        if not fits or high - low != prod(shape) * SIZES[dtype] or start + high > nbytes:
            raise ValueError(f"bytes [{shown(low)}, {shown(high)}) for {dtype}{shown([*shape])} in a file of {nbytes}")
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            "load", f"an entry of the header is wrong: {reason_of(error)}", [f"path  {path}"]
        ) from error
    sections = (Section(full_box(shape), file, start + low, start + high, ""),) if high > low else ()
    return Stored(dtype, shape, sections)


def _check_tiled(found: Mapping[str, Stored], start: int, nbytes: int, path: str) -> None:
    """Raises FormatError unless the tensors' bytes follow each other to the end of the file, as safetensors says."""
    at = start
    for low, high in sorted((s.start, s.stop) for kept in found.values() for s in kept.sections):
        if low != at:
            what = "overlap" if low < at else "leave a hole"
            raise FormatError("load", f"two tensors {what} at byte {min(low, at)}", [f"path  {path}"])
        at = high
    if at != nbytes:
        raise FormatError("load", f"the last {nbytes - at} of {nbytes} bytes belong to no tensor", [f"path  {path}"])


def prefix_of(state: Mapping[str, Any]) -> str:
    """The key of the one model in a state, with a dot: what a foreign checkpoint's names stand under.

    Raises FormatError where there is not exactly one.
    """
    keys = [key for key, value in state.items() if isinstance(value, nn.Module)]
    if len(keys) != 1:
        raise FormatError(
            "load", f"a folder of weights holds one model, and the state has {len(keys)}", [f"keys  {list(state)}"],
            [('load(path, {"model": model})', "")],
        )  # fmt: skip
    return f"{keys[0]}."
