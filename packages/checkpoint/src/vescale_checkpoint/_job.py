"""One save, from the state to the committed step; in the caller's thread or in one of its own.

    prepare   contents, agreement, draft directory, plan: the caller's thread, always
    stage     a copy of what this rank writes: only for an asynchronous save
    finish    write, sync, report to rank 0, which commits; retention

A background save talks through its own session, so that it never meets the training's
collectives. What fails there is kept, and raised once: by the next save, by `wait`, or by `close`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from atexit import register
from collections.abc import Mapping
from typing import Any

import torch
from crc32c import crc32c
from torch import Tensor

from vescale_dtensor import InternalError

from ._box import partition_fault
from ._catalogue import Catalogue, catalogue_of, unite
from ._commit import Draft, Retention, Root
from ._errors import CheckpointError, MismatchError, StorageError
from ._save_plan import Write, block_bytes, header_of, plan_writes
from ._state import Contents
from ._storage import LocalStorage
from ._sync import Session, forget_finished, mesh_ranks
from ._version import __version__
from ._write import Source, flat_of, staged, write_file
from .manifest import FileInfo, Manifest, Section, Stored

_staging: dict[Any, Tensor] = {}  # kept from one asynchronous save to the next
_in_flight: PendingSave | None = None


class PendingSave:
    """A save that was begun. `path` is the step's directory, once committed.

    `wait()` returns when it is committed, and raises, once, what made it fail; `done`
    tells without waiting.
    """

    def __init__(self, path: str, thread: threading.Thread | None = None) -> None:
        self.path = path
        self._thread, self._error = thread, None

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> str:
        """The path of the committed step. Raises the save's error, the same on all ranks."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.path


class SaveJob:
    """Prepared by its constructor, which communicates. Raises what `save` does."""

    def __init__(
        self,
        session: Session,
        path: str | os.PathLike[str],
        contents: Contents,
        step: int | None,
        retention: Retention | None,
        metrics: Mapping[str, float] | None,
        overwrite: bool,
    ) -> None:
        self.session, self.root = session, Root(path, "save")
        self._retention, self._metrics = retention, {key: float(value) for key, value in (metrics or {}).items()}
        self._draft: Draft | None = None
        try:
            own = catalogue_of(contents, session.size, mesh_ranks)
            if session.rank == 0:
                number = max(self.root.committed(), default=-1) + 1 if step is None else step
                self._draft = self.root.begin(number, overwrite)
            self._where, self.catalogue = self._agreed(own, step)
            self._check_folder()
            writes = plan_writes(self.catalogue.entries, session.rank)
            self._describe(contents, writes)
        except BaseException as error:
            self._give_up(error)
            raise

    @property
    def path(self) -> str:
        """Of the step, once it is committed."""
        return f"{self.root.path}/step-{self._where['step']:08d}"

    def stage(self) -> None:
        """Copies what this rank writes. Raises StorageError where there is no memory for it.

        Returns on all ranks or on none: what fails from here on fails in the background of all of them.
        """
        try:
            self._sources = staged(self._sources, _staging)
            self.session.gather("staged")
        except BaseException as error:
            self._give_up(error)
            raise

    def finish(self) -> None:
        """Writes, and returns when the step is committed. Raises the first cause on all ranks."""
        try:
            report = self._write()
            if self.session.rank:
                self.session.to_first("written", json.dumps(report).encode())
            else:
                self._commit([report, *map(json.loads, self.session.to_first("written")[1:])])
            self.session.gather("committed")
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Raises the first cause, unless `error` is it. The others are told before the draft is gone: a directory
        taken away from under them would be what they report."""
        try:
            if isinstance(error, Exception) and not (self.session._failed and isinstance(error, CheckpointError)):
                raise self.session.fail(error) from error
        finally:
            self.discard()

    def discard(self) -> None:
        if self._draft is not None:
            self._draft.discard()

    def _agreed(self, own: Catalogue, step: int | None) -> tuple[dict[str, Any], Catalogue]:
        """Rank 0's draft, and one catalogue: this rank's own if all have the same."""
        session, draft = self.session, self._draft
        mine = {"hash": own.hash().hex(), "step": step}
        if draft is not None:
            mine |= {"name": draft.name, "identity": draft.identity, "number": draft.step}
        answers = [json.loads(text) for text in session.gather("catalogue", json.dumps(mine).encode())]
        forget_finished(session)
        for rank, answer in enumerate(answers):
            if answer["step"] != answers[0]["step"]:
                raise MismatchError(
                    "save", "the ranks save different steps",
                    [f"rank 0  {answers[0]['step']}", f"rank {rank}  {answer['step']}"],
                )  # fmt: skip
        where = {"name": answers[0]["name"], "identity": answers[0]["identity"], "step": answers[0]["number"]}
        if all(answer["hash"] == mine["hash"] for answer in answers):
            return where, own
        return where, unite(session.gather("entries", own.to_json()))

    def _check_folder(self) -> None:
        folder = f"{self.root.path}/{self._where['name']}"
        if isinstance(self.root.storage, LocalStorage) and not self.root.storage.is_dir(folder):
            raise StorageError(
                "save", f"rank {self.session.rank} does not see the directory that rank 0 made", [f"path  {folder}"],
                [("use a file system that all ranks share", "")],
            )  # fmt: skip

    def _describe(self, contents: Contents, writes: list[Write]) -> None:
        flats: dict[str, Tensor] = {}
        for write in writes:
            name = write.entry.name
            if name not in flats:
                flats[name] = flat_of(contents.tensors[name])
        self._writes = writes
        self._sources = [Source(flats[write.entry.name], write.piece) for write in writes]
        self._block = block_bytes(sum(Stored(e.dtype, e.shape, ()).nbytes for e in self.catalogue.entries))

    def _write(self) -> dict[str, Any]:
        """Writes this rank's file; what rank 0 needs to know of it."""
        if not self._writes:
            return {}
        identity = self._where["identity"]
        name = f"{self.session.rank:05d}-{identity}.safetensors"
        header, starts = header_of(self._writes, self._where["step"], identity)
        path = f"{self.root.path}/{self._where['name']}/{name}"
        checks = write_file(self.root.storage, path, header, self._sources, self._block)
        sections = [
            (write.entry.name, write.piece.box, start, start + write.nbytes, check)
            for write, start, check in zip(self._writes, starts, checks, strict=True)
        ]
        last = sections[-1][3]
        self._sources = []
        return {"file": name, "info": (last, len(header), f"{crc32c(header):08x}"), "sections": sections}

    def _commit(self, reports: list[dict[str, Any]]) -> None:
        """On rank 0: the manifest, the rename, and then the retention."""
        sections: dict[str, list[Section]] = {entry.name: [] for entry in self.catalogue.entries}
        files = {}
        for report in reports:
            if not report:
                continue
            file = report["file"]
            files[file] = FileInfo(*report["info"])
            for name, box, start, stop, checks in report["sections"]:
                box = box if type(box) is tuple else tuple([(low, high) for low, high in box])
                sections[name].append(Section(box, file, start, stop, checks))
        tensors = {}
        for name, dtype, shape, tied, _, _ in self.catalogue.entries:
            found = sections[name]
            if (fault := partition_fault(shape, [section.box for section in found])) is not None:
                raise InternalError("the ranks did not write each element once", tensor=name, fault=fault)
            tensors[name] = Stored(dtype, shape, tuple(found), tied)
        text = Manifest(
            step=self._where["step"],
            identity=self._where["identity"],
            block_bytes=self._block,
            files=files,
            tensors=tensors,
            values=self.catalogue.values,
            about=self._about(),
        ).to_text()
        self._draft.commit(text)
        if self._retention is not None:
            self.root.retain(self._retention, keep=self._where["step"])

    def _about(self) -> dict[str, Any]:
        holders = [holder for entry in self.catalogue.entries for holder in entry.holders]
        meshes = dict.fromkeys(repr(mesh) for mesh in {holder.layout.mesh for holder in holders if holder.layout})
        return {
            "plan": self.catalogue.plan,
            "meshes": list(meshes),
            "world_size": self.session.size,
            "metrics": self._metrics,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "vescale_checkpoint": __version__,
            "torch": str(torch.__version__),
        }


def in_background(job: SaveJob) -> PendingSave:
    """Finishes a staged save in a thread of its own."""
    global _in_flight

    def run() -> None:
        try:
            job.finish()
        except Exception as error:
            failed = error if isinstance(error, CheckpointError) and job.session._failed else job.session.fail(error)
            failed.__cause__ = None if failed is error else error
            pending._error = failed
        finally:
            job.session.close()

    pending = PendingSave(job.path, threading.Thread(target=run, name="vescale-checkpoint-save"))
    _in_flight = pending
    pending._thread.start()
    return pending


def settle(*, raises: bool = True) -> None:
    """Waits for the save in flight, if there is one. Raises its failure, unless it is to be raised later."""
    global _in_flight
    pending = _in_flight
    if pending is None:
        return
    if not raises:
        pending._thread.join()
        return
    _in_flight = None
    pending.wait()


def close() -> None:
    """Waits for the save in flight and raises its failure; frees the staging memory. A later save works as before."""
    _staging.clear()
    settle()


def _tell_at_exit() -> None:
    if _in_flight is not None and _in_flight._error is not None:
        with contextlib.suppress(OSError):
            print(f"vescale_checkpoint: the last save failed, and nobody asked\n{_in_flight._error}", file=sys.stderr)


register(_tell_at_exit)
