"""A node's memory as a place for the steps of a run: private folders, how much fits, and who uses them.

A run's folder has a mark, which is the name of its folder in each node's memory: a run that was removed, and begun
anew, does not find what the former one left there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from pathlib import Path

from .._errors import ConflictError, StorageError
from ._commit import Root
from ._storage import LocalStorage, guarded

FOLDER = "VESCALE_PROTECT_DIR"  # the variable that names another place than /dev/shm
_MARK, _RUN, _LIVE, _NODE = "protected", "run", "live", "node"
_OTHER = (f"{FOLDER}=/another/folder", "in the environment of all ranks of the node")
_held: dict[str, int] = {}  # folders that this process uses -> its lock


def mark_of(root: Root) -> str:
    """Returns the mark of a run; "" where it has none."""
    path = f"{root.path}/{_MARK}"
    with guarded(root.operation, path, "cannot read the mark"):
        found = root.storage.read(path, 64).decode(errors="replace") if root.storage.exists(path) else ""
    return found if found.isalnum() else ""  # it becomes a part of paths


def marked(root: Root) -> str:
    """Returns the mark of a run, which it gets where it has none."""
    if not (mark := mark_of(root)):
        mark, path = secrets.token_hex(8), f"{root.path}/{_MARK}"
        with guarded(root.operation, path, "cannot write the mark"):
            root.storage.make_dirs(root.path)
            root.storage.remove_tree(path)
            with contextlib.closing(root.storage.create(path)) as writer:
                writer.write([mark.encode()])
    return mark


def place() -> str:
    """Returns this user's folder in the node's memory."""
    return f"{os.path.abspath(os.environ.get(FOLDER, '/dev/shm'))}/vescale-{os.geteuid()}"


def node(operation: str, *, makes: bool = False) -> str:
    """Returns a random name, the same for ranks that share the folder `place`; "" where it has none."""
    path = f"{place()}/{_NODE}"
    with guarded(operation, path, "cannot name the node"):
        if makes:
            os.makedirs(os.path.dirname(place()), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(place(), 0o700)
        if _is_private(place(), operation) and makes:
            with contextlib.suppress(FileExistsError):
                os.symlink(secrets.token_hex(4), path)  # made and written at once
        return os.readlink(path) if os.path.lexists(path) else ""


def memory(mark: str, operation: str) -> Root | None:
    """Returns the run's folder in this node's memory. None where there is none, or another process that lives uses it.

    Raises StorageError for one that others could read or replace.
    """
    root = Root(f"{place()}/{mark}", operation)
    root.storage = LocalStorage(reserves=True)
    found = _is_private(place(), operation) and _is_private(root.path, operation) and not _is_live(root.path)
    return root if found else None


def _is_private(path: str, operation: str) -> bool:
    """False if the folder is not there; StorageError if it is not private."""
    if not os.path.lexists(path):
        return False
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StorageError(
            operation, "the folder is to be this user's own, and closed to all others",
            [f"path  {path}", f"owner {found.st_uid}, mode {found.st_mode & 0o777:o}"], [("remove it", ""), _OTHER],
        )  # fmt: skip
    return True


def begin(mark: str, run: str) -> None:
    """Makes an empty folder for a run, on one rank of a node; removes those of runs that are not there any more."""
    folder = f"{place()}/{mark}"
    if _is_live(folder):
        raise ConflictError("protect", "another process protects this run", [f"path  {folder}"])
    with guarded("protect", folder, "cannot make the folder"):
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder, 0o700)
        Path(folder, _RUN).write_text(run)
    for path in Path(place()).iterdir():
        with contextlib.suppress(OSError, ValueError, StorageError):
            if mark_of(Root((path / _RUN).read_text(), "protect")) != path.name and not _is_live(str(path)):
                shutil.rmtree(path)


def end(here: Root, run: Root | None) -> None:
    """Removes a run's folder, on one rank of a node, and the mark of the run."""
    here.storage.remove_tree(here.path)
    if os.listdir(place()) == [_NODE]:
        here.storage.remove_tree(place())
    if run is not None:
        run.storage.remove_tree(f"{run.path}/{_MARK}")


def hold(folder: str, leads: bool) -> None:
    """This process uses the folder until `release`, or its end. The first rank of a node locks it for all: a lock of
    the process, which its children lack."""
    if folder not in _held:
        _held[folder] = os.open(f"{folder}/{_LIVE}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if leads:
        fcntl.lockf(_held[folder], fcntl.LOCK_EX)


def release(folder: str) -> None:
    if (lock := _held.pop(folder, None)) is not None:
        os.close(lock)


def _is_live(folder: str) -> bool:
    """True if another process uses the folder."""
    if folder in _held or not os.path.exists(f"{folder}/{_LIVE}"):
        return False  # to close a second descriptor would end this process's lock
    with open(f"{folder}/{_LIVE}") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def check_room(here: Root, nbytes: int, top: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> None:
    """Raises StorageError where so many bytes more do not fit into the folder, or into the job's limit of memory."""
    found = os.statvfs(here.path)
    free = {f"free in {here.path}": found.f_bavail * found.f_frsize} | _limits(top, own)
    if nbytes > (least := min(free.values())):
        raise StorageError(
            "protect", f"a step has {nbytes} bytes on this node, copies of others' included, and {least} fit",
            [f"{name}  {count}" for name, count in free.items()],
            [("protect(..., copies=0)", "a step is lost with its node"), _OTHER],
        )  # fmt: skip


def _limits(top: str, own: str) -> dict[str, int]:
    """Bytes that each limit of memory of this process's control groups leaves: of the second version, and the first."""
    found = {}
    for line in Path(own).read_text().splitlines() if os.path.exists(own) else ():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        base, names = Path(top), ("max", "current", "inactive_file")
        if kinds:
            base, names = base / "memory", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
        group = base / path.strip("/")
        for each in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError, KeyError):
                most, used = (int((each / f"memory.{name}").read_text()) for name in names[:2])
                stats = dict(row.split() for row in (each / "memory.stat").read_text().splitlines())
                found[f"left of the limit of {each}"] = most - used + int(stats[names[2]])
    return found
