"""The source of a load: a committed step, found, kept from deletion, and read as a manifest. Alike on all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from .. import dcp, manifest
from .._errors import CorruptError, MismatchError, StorageError, unseen
from ..foreign._told import told
from ..format._step import folder_of, step_number, step_of, step_replaced
from ..manifest import Manifest
from ..sync._sync import Session
from . import _huggingface
from ._commit import Root
from ._locks import leased
from ._storage import LocalStorage, Storage, guarded, storage_of

_TRIES = 8


@dataclass(frozen=True)
class Source:
    """A checkpoint to read: where its files are, and its manifest. `is_torchs`: a directory of torch's DCP."""

    storage: Storage
    folder: str
    manifest: Manifest
    is_torchs: bool = False


@contextmanager
def opened(
    session: Session, path: str | os.PathLike[str], step: int | None, state: Mapping[str, Any]
) -> Iterator[Source]:
    """The source that rank 0 finds, on every rank; within the block nobody deletes it.

    Raises StorageError, CorruptError, FormatError, or MismatchError where ranks see other files.
    """
    storage, given = storage_of(path, "load")
    if step is None and (found := _foreign(storage, given, state)) is not None:
        _check_same(session, found.manifest.to_text(), given)
        yield found
        return
    step = None if step is None else step_number("load", step)
    for attempt in range(_TRIES):
        folder = locate(path, step) if session.rank == 0 else ""
        folder = session.gather(f"folder {attempt}", folder.encode())[0].decode()
        with leased(storage, folder) as there:
            # A rank that came too late for a step that retention deleted makes all of them look again.
            answers = session.gather(f"there {attempt}", b"yes" if there else b"no")
            blind = [rank for rank, answer in enumerate(answers) if answer != b"yes"]
            if blind:
                continue
            data = _manifest_here(session, storage, folder)
            _check_same(session, data, folder)
            kept = manifest.parse(data, f"{folder}/{manifest.NAME}")
            check_folder(kept, folder)
            yield Source(storage, folder, kept)
            return
    if 0 not in blind:
        raise unseen("load", blind, folder)
    raise StorageError("load", f"the checkpoint vanished {_TRIES} times while it was opened", [f"path  {path}"])


def _manifest_here(session: Session, storage: Storage, folder: str) -> bytes:
    """The manifest that rank 0 has found."""
    try:
        return read_manifest(storage, folder)
    except CorruptError as error:
        if session.rank:
            raise unseen("load", [session.rank], folder) from error
        raise


def _foreign(storage: Storage, folder: str, state: Mapping[str, Any]) -> Source | None:
    """A checkpoint of another kind; None if the directory is none."""
    with guarded("load", folder, "cannot read the directory"):
        if dcp.is_folder(storage, folder):
            return Source(storage, folder, dcp.read_folder(storage, folder), is_torchs=True)
        folder, file = _huggingface.snapshot_of(storage, folder), None
        if folder.endswith(_huggingface.END) and storage.exists(folder) and not storage.is_dir(folder):
            folder, file = os.path.split(folder)
        if file or _huggingface.is_folder(storage, folder):
            linked = LocalStorage(follows_links=True) if isinstance(storage, LocalStorage) else storage
            prefix = _huggingface.prefix_of(state)
            return Source(linked, folder, _huggingface.read_folder(linked, folder, prefix, file))
    return None


def _check_same(session: Session, data: bytes, folder: str) -> None:
    odd = session.agree("manifest", blake2b(data, digest_size=16).digest())
    if odd:
        raise MismatchError(
            "load", f"rank {odd[0]} reads another checkpoint than rank 0", [f"path  {folder}"],
            [("use a file system that all ranks share", "")],
        )  # fmt: skip


def locate(path: str | os.PathLike[str], step: int | None) -> str:
    """The directory of a step: `path` itself if it is one, else the given or latest step under it."""
    root = Root(path, "load")
    if step is None:
        with guarded("load", root.path, "cannot read the directory"):
            if root.storage.exists(f"{root.path}/{manifest.NAME}"):
                return os.path.realpath(root.path) if isinstance(root.storage, LocalStorage) else root.path
        if step_of(os.path.basename(root.path)) is not None and root.storage.is_dir(root.path):
            raise CorruptError("load", "the manifest is missing", [f"path  {root.path}/{manifest.NAME}"])
    try:
        return f"{root.path}/{root.resolve(step)}"
    except StorageError as error:
        other = told(root.storage, root.path) if step is None else None
        if other is None:
            raise
        raise other from error


def check_folder(kept: manifest.Manifest, folder: str) -> None:
    """Raises CorruptError where a step's directory has the name of another step than its manifest."""
    name = os.path.basename(folder)
    named = step_of(name)
    named = step_replaced(name) if named is None else named
    if named is not None and named != kept.step:
        raise CorruptError(
            "load", f"the directory of step {named} holds step {kept.step}: it was renamed, or copied over",
            [f"path  {folder}"],
            [
                (f"rename it to {folder_of(kept.step)}", "what it is"),
                ("give it a name that is not a step's, and load that path", "if it is to stand by itself"),
            ],
        )  # fmt: skip


def read_manifest(storage: Storage, folder: str) -> bytes:
    """The manifest's bytes, at most manifest.MOST_BYTES of them. Raises CorruptError where it is missing."""
    target = f"{folder}/{manifest.NAME}"
    try:
        with guarded("load", target, "cannot read the manifest"):
            return storage.read(target, manifest.MOST_BYTES)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CorruptError("load", "the manifest is missing", [f"path  {target}"]) from error
        raise
