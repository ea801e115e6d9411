"""Lists, creates and deletes steps.

On a local file system a step is written into `step-N.tmp-ID` and committed by one
rename to `step-N`; nothing is ever written into a committed directory. "Latest" is
the highest committed step: it is derived, never stored. Who uses a directory holds
a lock on it (flock, gone with its process): its saver exclusively, readers shared.
So debris of killed saves is what nobody has locked, and retention deletes only what
nobody reads. Where the file system has no locks everything counts as in use.

Object stores cannot rename: there the manifest, written last, is the commit, and
debris is left alone, as nobody can tell it from a save that is under way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from .. import manifest
from .._errors import ConflictError, CorruptError, StorageError
from ..format._step import folder_of, step_left, step_of, step_replaced
from ._locks import lock_of, unused
from ._retention import Retention, stored_metrics, unknown_metric
from ._storage import LocalStorage, guarded, storage_of

_LISTINGS = 100  # in each of which others must have changed something, for another to follow


class Root:
    """The directory of a run: its steps."""

    def __init__(self, path: str | os.PathLike[str], operation: str) -> None:
        self.operation = operation
        self.storage, self.path = storage_of(path, operation)
        self.given = os.fspath(path).rstrip("/")

    def committed(self) -> dict[int, str]:
        """Step -> its directory's name, ascending.

        Steps come and go beside us: where one that was listed is gone, or nothing is found, it is listed again.
        """
        with guarded(self.operation, self.path, "cannot list the checkpoints"):
            listed = self._listed()
            for _ in range(_LISTINGS):
                found = {name: step for name, step in listed.items() if self._is_complete(name)}
                if found and len(found) == len(listed):
                    break
                before, listed = listed, self._listed()
                if listed == before:
                    break
        # What was being replaced counts only where its successor never came.
        return {step: name for name, step in sorted(found.items(), key=lambda row: (row[1], -len(row[0])))}

    def _listed(self) -> dict[str, int]:
        """The names that may be committed steps -> their steps."""
        found = {}
        for name in self.storage.names(self.path):
            step = step_of(name)
            step = step_replaced(name) if step is None else step
            if step is not None:
                found[name] = step
        return found

    def headless(self) -> list[int]:
        """Steps whose directory is there, and lost its manifest: a step gets its name when it has one.

        Not in an object store, where a save that was killed leaves such.
        """
        if not isinstance(self.storage, LocalStorage):
            return []
        with guarded(self.operation, self.path, "cannot list the checkpoints"):
            names = [name for name in self.storage.names(self.path) if step_of(name) is not None]
            return [step_of(name) for name in names if self.storage.lacks(f"{self.path}/{name}", manifest.NAME)]

    def resolve(self, step: int | None) -> str:
        """The name of the directory of `step`, or of the latest.

        Raises StorageError that lists those there are, CorruptError where the step lost its manifest, or a later one
        than the latest did.
        """
        steps = self.committed()
        if step is None and steps:
            newest = max(steps)
            lost = [number for number in self.headless() if number > newest]
            if lost and max(self.committed(), default=-1) < max(lost):
                raise CorruptError(
                    self.operation, f"step {max(lost)} is the latest, and its manifest is missing",
                    [f"path  {self.path}/{folder_of(max(lost))}"],
                    [
                        (f"load(..., step={newest})", "the latest complete step"),
                        ("remove or rename that directory", "then it is no step"),
                    ],
                )  # fmt: skip
            return steps[newest]
        if step in steps:
            return steps[step]
        with guarded(self.operation, self.path, "cannot read the checkpoints"):
            is_dir = self.storage.is_dir(self.path)
        if not is_dir:
            what = "it is a file" if self.storage.exists(self.path) else "it does not exist"
            raise StorageError(self.operation, f"there is no checkpoint: {what}", [f"path  {self.path}"])
        there = ", ".join(map(str, [*steps][-8:])) or "none"
        wanted = "no step is committed" if step is None else f"step {step} is not committed"
        operands = [f"path  {self.path}", f"committed steps  {there}"]
        if step in self.headless():
            raise CorruptError(self.operation, f"{wanted}: its manifest is missing", operands)
        raise StorageError(self.operation, wanted, operands)

    def begin(self, step: int, overwrite: bool) -> Draft:
        """A directory to write `step` into. Sweeps what killed saves left. Raises ConflictError, StorageError."""
        self._check_name(step)
        with guarded(self.operation, self.path, "cannot make the directory"):
            made = tuple(self.storage.make_dirs(self.path))
        if not overwrite:
            self._check_free(step)
        identity = secrets.token_hex(8)
        if not isinstance(self.storage, LocalStorage):
            with guarded(self.operation, self.path, "cannot make the directory"):
                self.storage.make_dirs(f"{self.path}/{folder_of(step)}")
            return Draft(self, step, identity, folder_of(step), overwrite, None)
        self.sweep()
        while True:
            name = f"{folder_of(step)}.tmp-{identity}"
            path = f"{self.path}/{name}"
            with guarded(self.operation, path, "cannot make the directory"):
                self.storage.make_dir(path)
                lock = lock_of(path, fcntl.LOCK_EX)
            if lock is not None:  # else a sweep took it for debris before it was locked
                return Draft(self, step, identity, name, overwrite, lock, made)
            identity = secrets.token_hex(8)

    def sees(self, name: str, identity: str) -> bool:
        """True if this rank sees the directory that another one created and marked."""
        path = f"{self.path}/{name}"
        with guarded(self.operation, path, "cannot read the directory"):
            if isinstance(self.storage, LocalStorage):
                return self.storage.is_dir(path)
            return self.storage.exists(_mark(path, identity))

    def next_step(self) -> int:
        """One more than the last, whole or not."""
        return max([*self.committed(), *self.headless()], default=-1) + 1

    def _check_name(self, step: int) -> None:
        """Raises StorageError for a run's directory that has a step's name: it would be loaded, or swept, as one."""
        name, parent = os.path.basename(self.path), os.path.dirname(self.given) or "."
        if step_of(name) is None and step_replaced(name) is None and step_left(name) is None:
            return
        raise StorageError(
            self.operation, f"{name!r} is a name that the steps of a run have, and not the run's own",
            [f"path  {self.path}", f"step {step} would be  {self.path}/{folder_of(step)}"],
            [(f"the path {parent}", f"this one would be {folder_of(step)} in it")]
            if not parent.endswith(":") else [("a name of another form", "")],
        )  # fmt: skip

    def _check_free(self, step: int) -> None:
        """Raises ConflictError where a step of this number, or something else of its name, is there."""
        if step in self.committed():
            raise self.conflict(step)
        path = f"{self.path}/{folder_of(step)}"
        if isinstance(self.storage, LocalStorage) and self.storage.exists(path) and self.storage.names_in(path) != []:
            if step in self.committed():  # by another saver, since the first look
                raise self.conflict(step)
            raise self.conflict(step, f"step {step} is not committed, and something else has its name")

    def conflict(self, step: int, what: str | None = None) -> ConflictError:
        return ConflictError(
            self.operation,
            f"step {step} is committed already" if what is None else what,
            [f"path  {self.path}"],
            [
                ("save(..., overwrite=True)", "the old one stays until the new one is committed"),
                ("save another step", ""),
            ],
        )

    def sweep(self) -> list[str]:
        """Removes what killed saves left, and nothing that anybody uses; returns the names."""
        if not isinstance(self.storage, LocalStorage):
            return []
        removed = []
        for name in self.storage.names(self.path):
            left = step_left(name)
            if left is None:
                continue
            step, kind = left
            path = f"{self.path}/{name}"
            with contextlib.suppress(OSError), unused(path) as held:
                if not held:
                    continue
                final = folder_of(step)
                if kind == "old" and self._is_complete(name) and not self._is_complete(final):
                    self.storage.rename(path, f"{self.path}/{final}")
                    continue
                self.storage.remove_tree(path)
                removed.append(name)
        return removed

    def check_policy(self, policy: Retention, metrics: Mapping[str, float]) -> None:
        """Raises MismatchError where `policy` goes by a metric that neither the new step nor any other has, and they
        have others: all but the last steps would go, the best too."""
        if policy.best is None or policy.best in metrics:
            return
        given = set(metrics)
        for name in self.committed().values():
            given |= self._metrics(name).keys()
        if given and policy.best not in given:
            raise unknown_metric(policy, sorted(given))

    def retain(self, policy: Retention, keep: int) -> list[int]:
        """Deletes committed steps that `policy` does not name, and that nobody reads; `keep` stays. Returns them."""
        steps = self.committed()
        metrics = {step: self._metrics(name) if policy.best else {} for step, name in steps.items()}
        kept = policy.kept(metrics) | {keep, max(steps, default=keep)}
        return [step for step, name in steps.items() if step not in kept and self._delete(step, name)]

    def _delete(self, step: int, name: str) -> bool:
        path = f"{self.path}/{name}"
        if not isinstance(self.storage, LocalStorage):
            self.storage.remove_tree(path)
            return True
        with contextlib.suppress(OSError), unused(path) as held:
            if held:
                self.take_away(path, step)
                return True
        return False

    def take_away(self, path: str, step: int) -> None:
        """Removes a directory of a local file system, renamed first: from then on it is no committed step, whole or
        not, and who still writes into it by its path can leave nothing behind."""
        gone = f"{self.path}/{folder_of(step)}.gone-{secrets.token_hex(8)}"
        self.storage.rename(path, gone)
        self.storage.remove_tree(gone)

    def _metrics(self, name: str) -> Mapping[str, float]:
        try:
            path = f"{self.path}/{name}/{manifest.NAME}"
            found = manifest.parse(self.storage.read(path, manifest.MOST_BYTES), path).about.get("metrics", {})
            return stored_metrics(found)
        except (OSError, EOFError, RuntimeError):  # an unreadable step has none; it stays or goes by the other rules
            return {}

    def _is_complete(self, name: str) -> bool:
        return self.storage.exists(f"{self.path}/{name}/{manifest.NAME}")


def _mark(path: str, identity: str) -> str:
    """The file by which other ranks see a directory of an object store, while it is written."""
    return f"{path}/begun-{identity}"


@dataclass
class Draft:
    """A step being written. `path` is where its files go; one process commits or discards it."""

    root: Root
    step: int
    identity: str
    name: str
    overwrite: bool
    lock: int | None
    made: tuple[str, ...] = ()  # directories that were not there before, the innermost first

    @property
    def path(self) -> str:
        return f"{self.root.path}/{self.name}"

    @property
    def final(self) -> str:
        """The directory's path once it is committed."""
        return f"{self.root.path}/{folder_of(self.step)}"

    def mark(self) -> None:
        """Makes the directory visible to other ranks: a store of objects shows none that is empty."""
        storage, path = self.root.storage, _mark(self.path, self.identity)
        if not isinstance(storage, LocalStorage):
            with guarded(self.root.operation, path, "cannot write the mark"):
                writer = storage.create(path)
                writer.write([self.identity.encode()])
                writer.close()

    def _unmark(self) -> None:
        with guarded(self.root.operation, self.path, "cannot remove the mark"):
            self.root.storage.remove_tree(_mark(self.path, self.identity))

    def commit(self, text: bytes) -> None:
        """Writes the manifest, and makes the step visible by one rename. Raises ConflictError, StorageError."""
        storage = self.root.storage
        target = f"{self.path}/{manifest.NAME}"
        if self.lock is None and not self.overwrite and storage.exists(target):
            raise self.root.conflict(self.step)
        if not isinstance(storage, LocalStorage):
            self._unmark()
        with guarded(self.root.operation, target, f"cannot write {len(text)} bytes of manifest"):
            writer = storage.create(target, len(text))
            try:
                writer.write([text])
            finally:
                writer.close()
        if isinstance(storage, LocalStorage):
            self._rename(storage)

    def _rename(self, storage: LocalStorage) -> None:
        with guarded(self.root.operation, self.final, "cannot commit the step"):
            storage.sync_dir(self.path)
            old = None
            if self.overwrite and storage.exists(self.final):
                old = f"{self.final}.old-{self.identity}"
                storage.rename(self.final, old)
            try:
                storage.rename(self.path, self.final)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise self.root.conflict(self.step) from error
                raise
            storage.sync_dir(self.root.path)
        self.release()
        if old is not None:
            with contextlib.suppress(OSError), unused(old) as held:
                if held:
                    storage.remove_tree(old)

    def discard(self) -> None:
        """Removes what was written, and the run's directory if it was made for it; a committed step is left alone."""
        if isinstance(self.root.storage, LocalStorage) and self.lock is not None:
            try:
                self.root.take_away(self.path, self.step)
            except OSError:  # it was committed, or nothing can be renamed here
                self.root.storage.remove_tree(self.path)
            with contextlib.suppress(OSError):  # somebody else's step is in it by now
                for path in self.made:
                    os.rmdir(path)
        elif not isinstance(self.root.storage, LocalStorage):
            with contextlib.suppress(StorageError):  # what failed before is what is told
                self._unmark()
        self.release()

    def release(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
