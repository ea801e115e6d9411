"""torch's distributed checkpoints, read as one more kind of checkpoint, and nothing in them run.

Their `.metadata` is a pickle, and so is what stands before every tensor's bytes. Both
are read as inert data; from them follow the box of every chunk and the byte range
where its values lie, and then a load is like any other. There are no checksums.

What is read to know that is bounded for the directory as a whole: opcodes, items of plain
values, and bytes of the archives' directories.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any

from ._errors import CheckpointError, FormatError
from .foreign import _inert_pickle as inert
from .foreign._inert_pickle import Budget, Global, InertError, Record, check_plain
from .format._box import partition_fault, row_major
from .format._dtypes import DTYPES, SIZES
from .format._text import natural, reason_of, shown, text_of
from .format._values import encode
from .io._storage import Reader, Storage, guarded
from .manifest import MOST_DIMS, FileInfo, Manifest, Section, Stored, plain_name

NAME = ".metadata"
MOST_BYTES = 256 << 20
_MOST_HEAD_BYTES = 1 << 20
_MOST_KEYS = 32  # from a state's top to a value
_MODULE = "torch.distributed.checkpoint."


def is_folder(storage: Storage, folder: str) -> bool:
    """True if a directory holds a torch distributed checkpoint."""
    return storage.exists(f"{folder}/{NAME}")


def read_folder(storage: Storage, folder: str) -> Manifest:
    """The manifest of such a directory; values that are not plain are left out.

    Raises FormatError for what this reader does not understand, StorageError.
    """
    path = f"{folder}/{NAME}"
    with guarded("load", path, "cannot read the metadata"):
        data = storage.read(path, MOST_BYTES)
    try:
        budget = Budget()
        return _Folder(storage, folder, inert.read(data, budget), budget).manifest()
    except CheckpointError:
        raise
    except EOFError as error:
        raise FormatError("load", "a file of a torch checkpoint ends too early", [f"path  {folder}"]) from error
    except (Exception, RecursionError) as error:  # zipfile raises six kinds, and what is not as it says any of Python's
        raise FormatError(
            "load",
            f"the metadata of a torch checkpoint are not in a form that this reader knows: {reason_of(error)}",
            [f"path  {path}"],
        ) from error


class _Folder:
    def __init__(self, storage: Storage, folder: str, metadata: Any, budget: Budget) -> None:
        self._storage, self._folder, self._budget = storage, folder, budget
        self._archive_bytes = MOST_BYTES
        self._fields = _state(metadata, "metadata", "Metadata")
        self._readers: dict[str, Reader] = {}

    def manifest(self) -> Manifest:
        places = {}
        for index, info in self._fields["storage_data"].items():
            key, found = _state(index, "metadata", "MetadataIndex"), _state(info, "filesystem", "_StorageInfo")
            if found.get("transform_descriptors"):
                raise ValueError("its bytes are transformed (compressed)")
            offset = None if key.get("offset") is None else _sizes(key["offset"])
            place = (plain_name(text_of(found["relative_path"])), natural(found["offset"]), natural(found["length"]))
            places[text_of(key["fqn"]), offset] = place
        tensors: dict[str, Any] = {}
        values: dict[str, Any] = {}
        try:
            for name, kept in self._fields["state_dict_metadata"].items():
                if text_of(name) and kept.kind.name == "TensorStorageMetadata":
                    tensors[name] = self._tensor(name, _state(kept, "metadata", "TensorStorageMetadata"), places)
                else:
                    self._value(name, places, values)
            files = {name: FileInfo(reader.nbytes, 0, "") for name, reader in self._readers.items()}
        finally:
            for reader in self._readers.values():
                reader.close()
        return Manifest(step=0, identity="", block_bytes=1, files=files, tensors=tensors, values=_listed(values))

    def _tensor(self, name: str, kept: Mapping[str, Any], places: Mapping) -> Stored:
        dtype, shape = _dtype(_properties(kept["properties"])), _sizes(kept["size"])
        sections, boxes = [], {}
        self._budget.items -= len(kept["chunks"])  # lists of chunks may be shared by many names
        if self._budget.items < 0:
            raise InertError("more chunks than a checkpoint may have")
        for chunk in kept["chunks"]:
            fields = _state(chunk, "metadata", "ChunkStorageMetadata")
            offsets, sizes = _sizes(fields["offsets"]), _sizes(fields["sizes"])
            if prod(sizes):
                boxes[tuple((low, low + size) for low, size in zip(offsets, sizes, strict=True))] = offsets, sizes
        fault = partition_fault(shape, list(boxes)) if boxes or prod(shape) else None
        if fault is not None:
            raise ValueError(f"the chunks of {shown(name)}: {fault}")
        for box, (offsets, sizes) in boxes.items():
            file, start = self._values_of(places[name, offsets], dtype, sizes)
            sections.append(Section(box, file, start, start + prod(sizes) * SIZES[dtype], ""))
        return Stored(dtype, shape, tuple(sections))

    def _values_of(self, place: tuple[str, int, int], dtype: str, sizes: tuple[int, ...]) -> tuple[str, int]:
        """The file and the byte where the values of a chunk begin: inside a zip archive inside the file."""
        file, offset, length = place
        archive = self._archive(file, offset, length)
        head, storage = _member(archive, "data.pkl"), _member(archive, "data/0")
        if head.file_size > _MOST_HEAD_BYTES:
            raise ValueError("what stands before its values is too long")
        made = inert.read(archive.read(head), self._budget)
        if type(made) is not Record or made.kind != Global("torch._utils", "_rebuild_tensor_v2"):
            raise ValueError(f"a chunk is made by {_described(made)}")
        held, first, size, stride = made.arguments[:4]
        if _sizes(size) != sizes or first != 0 or tuple(stride) != row_major(sizes):
            raise ValueError("a chunk does not lie row-major in its storage")
        if _storage_dtype(held) != dtype or storage.file_size < prod(sizes) * SIZES[dtype]:
            raise ValueError("a chunk is of another dtype or size than its metadata say")
        local = bytearray(30)
        self._reader(file).read_into(local, offset + storage.header_offset)
        start = offset + storage.header_offset + 30 + int.from_bytes(local[26:28], "little")
        return file, start + int.from_bytes(local[28:30], "little")

    def _value(self, name: str, places: Mapping, values: dict[str, Any]) -> None:
        file, offset, length = places[name, None]
        archive = self._archive(file, offset, length)
        head = _member(archive, "data.pkl")
        path = (self._fields.get("planner_data") or {}).get(name, (name,))
        if type(path) is not tuple or not 0 < len(path) <= _MOST_KEYS or not {str, int}.issuperset(map(type, path)):
            return
        if head.file_size > _MOST_HEAD_BYTES:
            return
        with suppress(InertError, CheckpointError):  # not a plain value: it stays where it is
            value = inert.read(archive.read(head), self._budget)
            check_plain(value, self._budget)
            encoded = encode(value, name, lambda *_: "")
            for key in path[:-1]:
                values = values.setdefault(key, {})
                if type(values) is not dict:
                    raise ValueError(f"{shown(name)} stands in a value that is no dict")
            values[path[-1]] = encoded

    def _archive(self, file: str, offset: int, length: int) -> zipfile.ZipFile:
        window = _Window(self._reader(file), offset, length)
        archive = zipfile.ZipFile(window)
        self._archive_bytes -= window.bytes_read
        if self._archive_bytes < 0:
            raise ValueError(f"the directories of its archives have more than {MOST_BYTES} bytes")
        return archive

    def _reader(self, file: str) -> Reader:
        if file not in self._readers:
            with guarded("load", f"{self._folder}/{file}", "cannot open the file"):
                self._readers[file] = self._storage.open(f"{self._folder}/{file}")
        return self._readers[file]


class _Window(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, reader: Reader, start: int, length: int) -> None:
        if start + length > reader.nbytes:
            raise ValueError(f"bytes [{start}, {start + length}) of a file of {reader.nbytes}")
        self._reader, self._start, self._length, self._at = reader, start, length, 0
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        wanted = self._length - self._at if size < 0 else size
        if wanted > _MOST_HEAD_BYTES:
            raise ValueError(f"an archive wants {wanted} bytes at once")
        self.bytes_read += max(0, wanted)
        return super().read(size)

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._reader.read_into(memoryview(buffer)[:count], self._start + self._at)
        self._at += count
        return count


def _listed(values: Any) -> Any:
    """A tree in which dicts that have a list's places for keys are that list; of a list with gaps nothing is left."""
    if type(values) is not dict:
        return values
    made = {key: _listed(value) for key, value in values.items()}
    if not any(type(key) is int for key in made):
        return made
    return [made[at] for at in range(len(made))] if made.keys() == set(range(len(made))) else {}


def _member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"an archive has {len(found)} members {name!r}, or it is compressed")
    return found[0]


def _state(record: Any, module: str, name: str) -> Mapping[str, Any]:
    if type(record) is not Record or record.kind != Global(_MODULE + module, name):
        raise ValueError(f"{_described(record)} where a {name} was expected")
    if type(record.state) is not dict:
        raise ValueError(f"a {name} without fields")
    return record.state


def _described(value: Any) -> str:
    return f"{shown(value.kind.module)}.{shown(value.kind.name)}" if type(value) is Record else shown(value)


def _properties(record: Any) -> Any:
    """The dtype in a TensorProperties, whose state is a tuple that begins with it, or a dict."""
    if type(record) is not Record or record.kind.name != "TensorProperties":
        raise ValueError("a tensor has no properties")
    return record.state["dtype"] if isinstance(record.state, dict) else record.state[0]


def _dtype(name: Any) -> str:
    if type(name) is not Global or name.module != "torch" or name.name not in DTYPES:
        raise ValueError(f"{shown(name)} is no dtype")
    return name.name


_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip


def _storage_dtype(held: Any) -> str | None:
    if type(held) is not Record or held.kind != Global("", "persistent"):
        raise ValueError("a chunk has no storage")
    kind = held.arguments[1]
    return _STORAGES.get(kind.name)


def _sizes(value: Any) -> tuple[int, ...]:
    """A torch.Size, or a tuple."""
    value = value.arguments[0] if type(value) is Record and value.kind == Global("torch", "Size") else value
    if type(value) is not tuple or len(value) > MOST_DIMS:
        raise ValueError(f"{shown(value)} are no sizes")
    return tuple(map(natural, value))
