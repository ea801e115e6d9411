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
import sys
import threading
import time
from atexit import register
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from crc32c import crc32c
from torch import Tensor

from ._errors import CheckpointError, MismatchError, unseen
from ._version import __version__
from .format._step import folder_of
from .io._commit import Draft, Root
from .io._memory import without_collector
from .io._pace import Pace
from .io._read import Files
from .io._retention import Retention, metrics_json
from .io._write import staged, write_file
from .manifest import FileInfo, Manifest
from .plan._catalogue import Catalogue, catalogue_of, unite
from .plan._outline import Skeleton, known_keys, outline_of
from .plan._state import Contents
from .sync._sync import Session, forget_finished, in_one_process, mesh_ranks, open_session, shared

_staging: dict[Any, Tensor] = {}  # kept from one asynchronous save to the next
_in_flight: PendingSave | None = None


class PendingSave:
    """A save in progress. `path` is the step's directory, once committed.

    `wait()` returns when the step is committed, and raises the save's failure, once; `done` reports the state without
    waiting.
    """

    def __init__(self, path: str, thread: threading.Thread | None = None, pace: Pace | None = None) -> None:
        self.path = path
        self._thread, self._error, self._pace = thread, None, pace

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> str:
        """Waits for the commit and returns the path of the step. Raises the save's error, the same on all ranks."""
        self._join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.path

    def _join(self) -> None:
        if self._pace is not None:
            self._pace.hurry()
        if self._thread is not None:
            self._thread.join()


class SaveJob:
    """Prepared by its constructor, which communicates. Raises what `save` does."""

    def __init__(
        self,
        session: Session,
        root: Root,
        contents: Contents,
        step: int | None,
        retention: Retention | None,
        metrics: Mapping[str, float],
        overwrite: bool,
    ) -> None:
        self.session, self.root = session, root
        self._retention, self._metrics = retention, metrics
        self._draft: Draft | None = None
        self._rest: Callable[[], None] = lambda: None
        try:
            own = catalogue_of(contents, session.size, mesh_ranks)
            if session.rank == 0:
                number = self.root.next_step() if step is None else step
                if retention is not None:
                    self.root.check_policy(retention, metrics)
                self._draft = self.root.begin(number, overwrite)
                if session.size > 1:
                    self._draft.mark()
            self._where, self.catalogue = self._agreed(own, step)
            self._outline = outline_of(self._key, lambda: self.catalogue.entries, session.rank)
            self._check_folder()
            self._sources = self._outline.sources(contents.tensors)
        except BaseException as error:
            self._give_up(error)
            raise

    @property
    def path(self) -> str:
        """Path of the step, once it is committed."""
        return f"{self.root.path}/{folder_of(self._where['step'])}"

    def stage(self) -> None:
        """Copies what this rank writes. Raises StorageError where there is no memory for it.

        Returns on all ranks or on none: what fails from here on fails in the background of all of them.
        """
        try:
            self._set_aside()
            self.session.gather("staged")
        except BaseException as error:
            self._give_up(error)
            raise

    def _set_aside(self) -> None:
        self._sources = staged(self._sources, _staging)

    def finish(self) -> None:
        """Writes, and returns when the step is committed. Raises the first cause on all ranks."""
        try:
            report = self._write()
            if self.session.rank:
                self.session.to_first("written", json.dumps(report).encode())
            else:
                self._commit([report, *map(json.loads, self.session.to_first("written")[1:])])
            self._spread()
            self.session.gather("committed")
            self.session.part()
        except BaseException as error:
            self._give_up(error)
            raise

    def _spread(self) -> None:
        """What is left to do on other ranks, once rank 0 has committed."""

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
        structure = own.structure()
        mine = {"hash": own.hash(structure).hex(), "structure": structure.hex(), "step": step}
        if draft is not None:
            mine |= {"name": draft.name, "identity": draft.identity, "number": draft.step, "known": known_keys()}
        answers = [json.loads(text) for text in session.gather("catalogue", json.dumps(mine).encode())]
        forget_finished(session)
        for rank, answer in enumerate(answers):
            if answer["step"] != answers[0]["step"]:
                raise MismatchError(
                    "save", "the ranks save different steps",
                    [f"rank 0  {answers[0]['step']}", f"rank {rank}  {answer['step']}"],
                )  # fmt: skip
        where = {"name": answers[0]["name"], "identity": answers[0]["identity"], "step": answers[0]["number"]}
        together = blake2b("".join([answer["structure"] for answer in answers]).encode(), digest_size=16)
        self._key = f"{session.rank} of {session.size}: {together.hexdigest()}"
        self._is_known = f"0 of {session.size}: {together.hexdigest()}" in answers[0]["known"]
        if all(answer["hash"] == mine["hash"] for answer in answers):
            return where, own
        return where, unite(session.gather("entries", own.to_json()))

    def _check_folder(self) -> None:
        if self.session.rank and not self.root.sees(self._where["name"], self._where["identity"]):
            raise unseen("save", [self.session.rank], f"{self.root.path}/{self._where['name']}")

    def _write(self) -> dict[str, Any]:
        """Writes this rank's file; what rank 0 needs to know of it: of the sections only what it does not know."""
        outline = self._outline
        if not outline.writes:
            return {}
        header = outline.header.to_bytes(self._where["step"], self._where["identity"])
        path = f"{self.root.path}/{self._where['name']}/{self._file(self.session.rank)}"
        checks = write_file(self.root.storage, path, header, self._sources, outline.block, self._rest)
        self._sources = []
        info = (len(header) + outline.header.data_nbytes, len(header), f"{crc32c(header):08x}")
        return {"info": info, "checks": checks, "rows": [] if self._is_known else outline.rows()}

    def _file(self, rank: int) -> str:
        return f"{rank:05d}-{self._where['identity']}.safetensors"

    def _commit(self, reports: list[dict[str, Any]]) -> None:
        """Commits, on rank 0: a look at all files, the manifest, the rename, and then the retention."""
        outline = self._outline
        if not self._is_known:
            rows = [report.get("rows", ()) for report in reports]
            outline.skeleton = Skeleton(self.catalogue.entries, rows, outline.block)
        names = [self._file(rank) for rank in range(len(reports))]
        infos = {name: FileInfo(*report["info"]) for name, report in zip(names, reports) if report}
        self._check_files(infos)
        text = Manifest(
            step=self._where["step"],
            identity=self._where["identity"],
            block_bytes=outline.block,
            files=infos,
            tensors={},
            values=self.catalogue.values,
            about=self._about(),
        ).to_text(outline.skeleton.text(names, [report.get("checks", "") for report in reports]))
        self._draft.commit(text)
        if self._retention is not None:
            self.root.retain(self._retention, keep=self._where["step"])

    def _check_files(self, infos: Mapping[str, FileInfo]) -> None:
        """Raises CorruptError where a file is not there as its rank says: a step is made of what is on disk."""
        files = Files(self.root.storage, self._draft.path, infos, True, "save")
        try:
            files.check(sorted(infos))
        finally:
            files.close()

    def _about(self) -> dict[str, Any]:
        distinct = {id(entry.holders): entry.holders for entry in self.catalogue.entries}
        layouts = [holder.layout for holders in distinct.values() for holder in holders]
        meshes = dict.fromkeys(repr(layout.mesh) for layout in layouts if layout is not None)
        return {
            "plan": self.catalogue.plan,
            "meshes": list(meshes),
            "world_size": self.session.size,
            "metrics": metrics_json(self._metrics),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "vescale_checkpoint": __version__,
            "torch": str(torch.__version__),
        }


def started(operation: str, make: Callable[[Session], SaveJob], asynchronous: bool) -> PendingSave:
    """Runs a save, to its end or, if it is asynchronous, until what it needs of the state is set aside."""
    asynchronous = asynchronous and not in_one_process()  # where a thread of a rank's would not wait for its turn
    session = open_session(operation)
    try:
        with shared(session), without_collector():
            job = make(session)
            if asynchronous:
                job.stage()
            else:
                job.finish()
    except BaseException:
        session.close()
        raise
    if asynchronous:
        return in_background(job)
    session.close()
    return PendingSave(job.path)


def in_background(job: SaveJob) -> PendingSave:
    """Finishes a staged save in a thread of its own, which rests between chunks until somebody waits for it."""
    global _in_flight
    returning, pace = threading.Event(), Pace()
    job._rest = pace.rest

    def run() -> None:
        returning.wait()
        try:
            job.finish()
        except Exception as error:
            failed = error if isinstance(error, CheckpointError) and job.session._failed else job.session.fail(error)
            failed.__cause__ = None if failed is error else error
            save._error = failed
        finally:
            job.session.close()

    save = PendingSave(job.path, threading.Thread(target=run, name="vescale-checkpoint-save"), pace)
    try:
        save._thread.start()
        _in_flight = save
    except RuntimeError as error:  # no thread to be had: the others are told, as theirs wait for this rank
        try:
            job._give_up(error)
        finally:
            job.session.close()
    finally:
        returning.set()  # not before: a thread at work keeps the interpreter for itself for milliseconds
    return save


def wait_for_save(*, raises: bool = True) -> None:
    """Waits for the save in flight, if there is one. Raises its failure, unless it is to be raised later."""
    global _in_flight
    save = _in_flight
    if save is None:
        return
    if not raises:
        save._join()
        return
    _in_flight = None
    save.wait()


def close() -> None:
    """Waits for the save in flight and raises its failure; frees the staging memory. A later save works as before."""
    _staging.clear()
    wait_for_save()


def _tell_at_exit() -> None:
    if _in_flight is not None and _in_flight._error is not None:
        with contextlib.suppress(OSError):
            print(f"vescale_checkpoint: the last save failed, and nobody asked\n{_in_flight._error}", file=sys.stderr)


register(_tell_at_exit)
