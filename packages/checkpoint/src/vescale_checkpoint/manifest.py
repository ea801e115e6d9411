"""The manifest: what a checkpoint holds, as one JSON file that checks itself.

README.md describes the format for whoever writes another reader. `Manifest.to_text`
and `parse` are inverse; `parse` trusts nothing: sizes, ranges and boxes are
checked before anybody reads a byte of data by them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from crc32c import crc32c

from ._errors import CorruptError, FormatError
from .format._box import Box, full_box, partition_fault, volume
from .format._dtypes import SIZES
from .format._json import check_levels, parse_json
from .format._text import natural, reason_of, shown, text_of

NAME = "manifest.json"
FORMAT = "vescale-checkpoint"
VERSION = (1, 0)
MOST_BYTES = 256 << 20  # of a manifest: a million sections; bounds what a hostile one can make us allocate
MOST_DIMS = 64
_TAIL = ',\n"checksum": "crc32c:%08x"}\n'
_TAIL_BYTES = len(_TAIL % 0)


class Section(NamedTuple):
    """One box of a tensor as it lies in a file: row-major, bytes [start, stop) of the file.

    `checks` is the CRC-32C of each block of the section (the last may be shorter), 8
    hexadecimal digits each, one after the other; empty if a foreign file has none.
    """

    box: Box
    file: str
    start: int
    stop: int
    checks: str


class Stored(NamedTuple):
    """One tensor: its global shape, torch's name of its dtype, and sections that partition it.

    `tied`: further names of the same tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    sections: tuple[Section, ...]
    tied: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES[self.dtype]


class FileInfo(NamedTuple):
    """One data file: its size, and the length and CRC-32C of what precedes the tensors' bytes."""

    nbytes: int
    header_nbytes: int
    header_check: str


@dataclass(frozen=True)
class Manifest:
    """Everything that a checkpoint holds but the tensors' bytes.

    `values` is the tree of all that is no tensor; `about` is information that loading
    does not need: plan, mesh, world size, library versions, metrics, time.
    """

    step: int
    identity: str
    block_bytes: int
    files: Mapping[str, FileInfo]
    tensors: Mapping[str, Stored]
    values: Any = None
    about: Mapping[str, Any] = field(default_factory=dict)
    version: tuple[int, int] = VERSION

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to_text(self, tensors: str | None = None) -> bytes:
        """The file's bytes, its checksum included; `tensors`: their text, where it is known already.

        Raises FormatError beyond MOST_BYTES.
        """
        fields = {
            "format": FORMAT,
            "version": self.version,
            "step": self.step,
            "identity": self.identity,
            "about": self.about,
            "values": self.values,
            "block_bytes": self.block_bytes,
            "files": self.files,
        }
        text = "".join(tensor_parts(self.tensors)) if tensors is None else tensors
        body = json.dumps(fields, separators=(",", ":"), allow_nan=False)[:-1].encode() + b',"tensors":' + text.encode()
        if len(body) > MOST_BYTES:
            raise FormatError(
                "save", f"the manifest would have {len(body)} bytes, more than {MOST_BYTES}",
                (), [("save larger tensors, or fewer", "")],
            )  # fmt: skip
        return body + (_TAIL % crc32c(body)).encode()


def tensor_parts(tensors: Mapping[str, Stored]) -> list[str]:
    """The text of `tensors` in parts. Of the parts with an odd index, which alternate, one is a section's file, in
    quotes, and the next its checks, without; the sections in order."""
    parts: list[str] = []
    text = "{"
    known: dict[Any, str] = {}
    for i, (name, (dtype, shape, sections, tied)) in enumerate(tensors.items()):
        comma, shape_text = "," if i else "", _compact(shape, known)
        text += f'{comma}{json.dumps(name)}:{{"dtype":"{dtype}","shape":{shape_text},"sections":['
        for j, (box, file, start, stop, checks) in enumerate(sections):
            parts += (
                f'{text}{"," if j else ""}[{_compact(box, known)},', _compact(file, known),
                f',{start},{stop},"', checks,
            )  # fmt: skip
            text = '"]'
        text += f'],"tied":{json.dumps(tied)}}}' if tied else "]}"
    return [*parts, text + "}"]


def _compact(value: Any, known: dict[Any, str]) -> str:
    """A shape, box, or file as JSON; the same few come again and again."""
    found = known.get(value)
    if found is None:
        found = known[value] = json.dumps(value, separators=(",", ":"))
    return found


def parse(data: bytes, path: str) -> Manifest:
    """The manifest of a file's bytes. Raises CorruptError where they were altered, FormatError where they lie."""
    body = data[:-_TAIL_BYTES]
    if len(data) <= _TAIL_BYTES or data[-_TAIL_BYTES:] != (_TAIL % crc32c(body)).encode():
        raise CorruptError(
            "load", "the manifest is not as it was written: its checksum does not fit", [f"path  {path}"],
            [("load an earlier step", "`vescale checkpoint verify` tells which are complete")],
        )  # fmt: skip
    return _checked(_decoded(body + b"}", path), path)


def _decoded(data: bytes, path: str) -> dict[str, Any]:
    try:
        fields = parse_json(data)
    except ValueError as error:
        rule = f"the manifest is not JSON that this reader accepts: {error}"
        raise FormatError("load", rule, [f"path  {path}"]) from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise FormatError("load", f"the file is not a manifest of format {FORMAT!r}", [f"path  {path}"])
    return fields


def _checked(fields: dict[str, Any], path: str) -> Manifest:
    try:
        version = _pair(fields["version"])
        if version[0] > VERSION[0]:
            raise FormatError(
                "load",
                f"the checkpoint has format version {version[0]}.{version[1]}, but this reader supports {VERSION[0]}.x",
                [f"path  {path}"],
                [(f"pip install -U vescale-checkpoint  # upgrade to >= {version[0]}.0", "")],
            )
        about = _mapping(fields.get("about", {}))
        check_levels([fields["values"], about])
        block = natural(fields["block_bytes"])
        _require(block > 0, "block_bytes is 0")
        files = {plain_name(name): _file_info(info) for name, info in _mapping(fields["files"]).items()}
        shapes: _Shapes = {}
        tensors = {
            name: _stored(name, entry, files, block, shapes) for name, entry in _mapping(fields["tensors"]).items()
        }
        _check_bytes(files, tensors)
        return Manifest(
            step=natural(fields["step"]),
            identity=text_of(fields["identity"]),
            block_bytes=block,
            files=files,
            tensors=tensors,
            values=fields["values"],
            about=about,
            version=version,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else reason_of(error).partition(": ")[2]
        raise FormatError("load", f"the manifest breaks the format: {reason}", [f"path  {path}"]) from error


_Shapes = dict[tuple[int, ...], tuple[tuple[int, ...], Box, list[list[int]], int]]


def _stored(name: str, entry: Mapping[str, Any], files: Mapping[str, FileInfo], block: int, shapes: _Shapes) -> Stored:
    """`shapes`: those seen before, each with itself checked, its box, that as JSON has it, and its volume."""
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    size = SIZES.get(dtype)
    if size is None:
        raise ValueError(f"tensor {name!r} has an unknown dtype {shown(dtype)}")
    known = shapes.get(shape)
    for length in shape:
        if type(length) is not int:
            known = None
    if known is None:
        _require(len(shape) <= MOST_DIMS, f"tensor {name!r} has {len(shape)} dims")
        shape = tuple(map(natural, shape))
        known = shapes[shape] = shape, full_box(shape), [[0, length] for length in shape], prod(shape)
    shape, outer, outer_json, count = known
    sections = []
    for box, file, start, stop, checks in entry["sections"]:
        if box == outer_json:
            box = outer
        else:
            box = tuple([(low, high) for low, high in box])
            for low, high in box:
                if type(low) is not int or type(high) is not int:
                    raise ValueError(f"tensor {name!r} has the box {shown(box)}")
        info = files.get(file)
        if info is None:
            raise ValueError(f"tensor {name!r} names the file {shown(file)}, which is not listed")
        if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= info.nbytes:
            span = f"[{shown(start)}, {shown(stop)})"
            raise ValueError(f"tensor {name!r} has the bytes {span} of {file!r}, which are not in the file")
        if type(checks) is not str or len(checks) != 8 * -(-(stop - start) // block):
            raise ValueError(f"tensor {name!r} has another number of checksums than blocks in {file!r}")
        sections.append(Section(box, file, start, stop, checks))
    is_whole = len(sections) == 1 and sections[0].box is outer and stop - start == count * size and count
    if not is_whole:  # a few of many
        fault = partition_fault(shape, [section.box for section in sections])
        _require(fault is None, f"tensor {name!r}: {fault}")
        for section in sections:
            if section.stop - section.start != volume(section.box) * size:
                raise ValueError(f"tensor {name!r}: {section.stop - section.start} bytes for the box {section.box}")
    tied = entry.get("tied", ())
    return Stored(dtype, shape, tuple(sections), tuple(map(text_of, tied)) if tied != () else ())


def _check_bytes(files: Mapping[str, FileInfo], tensors: Mapping[str, Stored]) -> None:
    """Per file, header and sections follow each other without overlap or hole: every byte is under a checksum."""
    spans: dict[str, tuple[list[int], list[int]]] = {name: ([], [info.header_nbytes]) for name, info in files.items()}
    for tensor in tensors.values():
        for _, file, start, stop, _ in tensor.sections:
            starts, stops = spans[file]
            starts.append(start)
            stops.append(stop)
    for name, (starts, stops) in spans.items():
        # No section is empty; so they tile the file just where each starts at another's end.
        if sorted(stops) == [*sorted(starts), files[name].nbytes]:
            continue
        at = 0
        found = sorted([(0, stops[0]), *zip(starts, stops[1:])])
        for start, stop in found:
            _require(start >= at, f"two sections of {name!r} overlap at byte {start}")
            _require(start == at, f"bytes [{at}, {start}) of {name!r} belong to no tensor")
            at = stop
        _require(at == files[name].nbytes, f"bytes [{at}, {files[name].nbytes}) of {name!r} belong to no tensor")


def _file_info(info: Any) -> FileInfo:
    nbytes, header_nbytes, check = info
    _require(len(text_of(check)) == 8, f"{shown(check)} is no checksum")
    _require(natural(header_nbytes) <= MOST_BYTES, f"a header of {header_nbytes} bytes")
    return FileInfo(natural(nbytes), natural(header_nbytes), check)


def plain_name(name: str) -> str:
    """A file of the checkpoint's own directory: nothing that could lead out of it."""
    _require(
        name not in ("", ".", "..", NAME) and not any(c in name for c in "/\\:\0") and len(name) < 256,
        f"{name!r} is not the name of a file in this directory",
    )
    return name


def _pair(value: Any) -> tuple[int, int]:
    major, minor = map(natural, value)
    return major, minor


def _mapping(value: Any) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is no object")
    return value


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
