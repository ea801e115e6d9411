"""The errors of checkpoints: each a `VescaleError`, with the same text on all ranks.

An error of one rank travels to the others as JSON (`to_json`, `from_json`), so
that every rank raises the first cause and none waits for what will not come.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from vescale_dtensor import VescaleError

from .format._text import printable, reason_of


class CheckpointError(VescaleError):
    """Base class of all errors of saving and loading. The text has no control characters and a bounded length.

    touched: if a load failed half-way, the names of the state's tensors that this rank has overwritten, wholly or in
    part. The state is then a mixture.
    """

    touched: tuple[str, ...] = ()

    def __init__(
        self,
        operation: str,
        rule: str,
        operands: Iterable[str] = (),
        remedies: Iterable[tuple[str, str]] = (),
    ) -> None:
        super().__init__(
            printable(operation),
            printable(rule, lines=True),
            [printable(operand) for operand in operands],
            [(printable(code), printable(cost)) for code, cost in remedies],
        )


class StorageError(CheckpointError):
    """A path cannot be read or written. The message gives the path, the number of bytes and the system's reason."""


class CorruptError(CheckpointError):
    """The bytes read are not the bytes that were written: truncated, altered, missing, or from another checkpoint."""


class FormatError(CheckpointError):
    """A manifest violates the format, or was written by a newer major version."""


class ConflictError(CheckpointError):
    """Two processes save the same step, or the step already exists."""


class MismatchError(CheckpointError):
    """Names, shapes or dtypes in the checkpoint differ from those of the state, or the ranks disagree."""


class UnsafeError(CheckpointError):
    """Only pickle could store the value, or read the file."""


class PeerError(CheckpointError):
    """Another rank died, or did not respond in time."""


_TYPES = {
    kind.__name__: kind
    for kind in (
        CheckpointError, StorageError, CorruptError, FormatError, ConflictError, MismatchError, UnsafeError, PeerError,
    )
}  # fmt: skip


def to_json(error: BaseException, operation: str) -> bytes:
    """The error as bytes for other ranks; what is not ours is described by type and text."""
    ours = isinstance(error, VescaleError)
    rule = error.rule if ours else reason_of(error)
    fields = {
        "type": type(error).__name__ if type(error).__name__ in _TYPES else "CheckpointError",
        "operation": error.operation if ours else operation,
        "rule": rule,
        "operands": list(error.operands) if ours else [],
        "remedies": [list(pair) for pair in error.remedies] if ours else [],
    }
    return json.dumps(fields).encode()


def from_json(data: bytes) -> CheckpointError:
    """The error that another rank sent."""
    fields = json.loads(data)
    kind = _TYPES[fields["type"]]
    remedies = [(code, cost) for code, cost in fields["remedies"]]
    return kind(fields["operation"], fields["rule"], fields["operands"], remedies)


def of_system(error: OSError, operation: str, path: str, doing: str) -> StorageError:
    """An operating system's error, with the path and what was being done."""
    reason = error.strerror or str(error) or type(error).__name__
    return StorageError(operation, f"{doing}: {reason}", [f"path  {path}"])


def unseen(operation: str, ranks: Sequence[int], folder: str) -> StorageError:
    """The error where some ranks do not see what rank 0 does: another machine's disk, or a store in its memory."""
    who = f"rank {ranks[0]} does" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))} do"
    what = "the directory that rank 0 created" if operation == "save" else "the checkpoint that rank 0 sees"
    return StorageError(
        operation, f"{who} not see {what}", [f"path  {folder}"], [("use a file system that all ranks share", "")]
    )
