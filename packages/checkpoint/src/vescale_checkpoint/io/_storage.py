"""Storages: a local directory tree through the operating system, anything else through fsspec.

Both offer the same few operations on absolute paths. Local files are written and
read with vectored positional calls straight from and into tensors' memory; nothing
below follows a symbolic link out of the checkpoint. OSErrors are raised as they
are, or by these classes with a path; `guarded` makes StorageErrors of them.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .._errors import StorageError, of_system

if TYPE_CHECKING:
    Path = str | os.PathLike[str]
else:
    Path = Any  # as users give it: `storage_of` says what is none
_MOST_BUFFERS = 512  # of one vectored call; IOV_MAX is 1024
FLUSH_BYTES = 64 << 20  # written since the last early sync, for another


class Writer(Protocol):
    """A file being written from front to back."""

    def write(self, buffers: Sequence[Any]) -> None: ...

    def close(self) -> None:
        """Returns when the bytes will survive a crash of the machine."""


class Reader(Protocol):
    """A file open for reads of ranges, from several threads."""

    nbytes: int

    def read_into(self, buffer: Any, start: int) -> None:
        """Fills the buffer from byte `start`. Raises EOFError where the file is shorter."""

    def close(self) -> None: ...


class LocalStorage:
    """Paths of this machine's file system.

    Arguments: whether files may be symbolic links, as they are in the cache of HuggingFace's hub (what a link leads to
    is a regular file, or an error, as any file is); whether space for a file is reserved before it is written.
    """

    can_rename = True

    def __init__(self, *, follows_links: bool = False, reserves: bool = False) -> None:
        self._reserves = reserves
        self._flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)

    def make_dirs(self, path: str) -> list[str]:
        """Returns those that were not there, the innermost first."""
        absent, above = [], path
        while not os.path.lexists(above):
            absent.append(above)
            above = os.path.dirname(above)
        os.makedirs(path, exist_ok=True)
        return absent

    def make_dir(self, path: str) -> None:
        """Raises FileExistsError."""
        os.mkdir(path)

    def names(self, path: str) -> list[str]:
        """Lists a directory; empty if it does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def names_in(self, path: str) -> list[str] | None:
        """Lists a directory; None if it is none."""
        try:
            return os.listdir(path)
        except OSError:
            return None

    def lacks(self, folder: str, name: str) -> bool:
        """True if, at one moment, `folder` is a directory with entries but without this one."""
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            entries = os.listdir(descriptor)
            return bool(entries) and name not in entries and os.path.samestat(os.fstat(descriptor), os.stat(folder))
        except FileNotFoundError:
            return False
        finally:
            os.close(descriptor)

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def create(self, path: str, nbytes: int = 0) -> _LocalWriter:
        return _LocalWriter(path, nbytes if self._reserves else 0)

    def open(self, path: str) -> _LocalReader:
        return _LocalReader(path, self._flags)

    def read(self, path: str, most: int) -> bytes:
        """A whole file. Raises OSError(EFBIG) where it has more than `most` bytes."""
        with contextlib.closing(self.open(path)) as reader:
            if reader.nbytes > most:
                raise OSError(errno.EFBIG, f"the file has {reader.nbytes} bytes, more than {most}", path)
            data = bytearray(reader.nbytes)
            reader.read_into(data, 0)
            return bytes(data)

    def rename(self, source: str, target: str) -> None:
        """Atomic. Raises OSError where a target exists that is not an empty directory."""
        os.rename(source, target)

    def sync_dir(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_tree(self, path: str) -> None:
        """Removes a directory, or a file."""
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(path)


class _LocalWriter:
    """A large file is on its way to the disk while more of it is written: a thread syncs what there is already."""

    def __init__(self, path: str, reserved: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        if reserved:
            os.posix_fallocate(self._fd, 0, reserved)
        self._waiting, self._error = 0, None  # bytes that no sync was begun for; the system tells a failure once only
        self._flusher: threading.Thread | None = None

    def write(self, buffers: Sequence[Any]) -> None:
        for at in range(0, len(buffers), _MOST_BUFFERS):
            views = [memoryview(buffer).cast("B") for buffer in buffers[at : at + _MOST_BUFFERS]]
            self._waiting += sum(map(len, views))
            self._write_all(views)
        if self._waiting >= FLUSH_BYTES and (self._flusher is None or not self._flusher.is_alive()):
            if self._error is not None:
                raise self._error
            self._flusher = threading.Thread(target=self._flush, name="vescale-checkpoint-flush")
            self._waiting = 0
            with contextlib.suppress(RuntimeError):  # no threads any more, as the interpreter ends: `close` does it all
                self._flusher.start()

    def _flush(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._error = error

    def _write_all(self, views: list[memoryview]) -> None:
        while views:
            written = os.writev(self._fd, views)
            if not written and any(map(len, views)):
                raise OSError(errno.EIO, "the system wrote nothing")
            while views and written >= len(views[0]):  # a short write: go on where it ended
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]

    def close(self) -> None:
        try:
            if self._flusher is not None and self._flusher.is_alive():
                self._flusher.join()
            if self._error is not None:
                raise self._error
            os.fsync(self._fd)
        finally:
            os.close(self._fd)


class _LocalReader:
    """A regular file: what else has a name there may block whoever opens or reads it."""

    def __init__(self, path: str, flags: int) -> None:
        mode = os.stat(path, follow_symlinks=not flags & os.O_NOFOLLOW).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):  # a link: to be refused by the system, as it says best
            raise OSError(errno.EINVAL, "not a regular file", path)
        self._fd = os.open(path, flags)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._fd)
            raise OSError(errno.EINVAL, "not a regular file", path)
        self.nbytes = found.st_size

    def read_into(self, buffer: Any, start: int) -> None:
        view = memoryview(buffer).cast("B")
        while len(view):
            count = os.preadv(self._fd, [view], start)
            if not count:
                raise EOFError
            view, start = view[count:], start + count

    def close(self) -> None:
        os.close(self._fd)


class RemoteStorage:
    """Paths of any file system that fsspec opens, by URL ("s3://bucket/run", "memory://run").

    Objects appear whole or not at all, but directories cannot be renamed atomically:
    a checkpoint is committed by its manifest, which is written last.
    """

    can_rename = False

    def __init__(self, protocol: str, options: dict[str, Any] | None = None) -> None:
        import fsspec

        self._files = fsspec.filesystem(protocol, **(options or {}))

    def make_dirs(self, path: str) -> list[str]:
        self._files.makedirs(path, exist_ok=True)
        return []

    make_dir = make_dirs

    def names(self, path: str) -> list[str]:
        self._files.invalidate_cache(path)
        try:
            found = self._files.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted({entry.rstrip("/").rsplit("/", 1)[-1] for entry in found} - {""})

    def is_dir(self, path: str) -> bool:
        return self._files.isdir(path)

    def exists(self, path: str) -> bool:
        self._files.invalidate_cache(path)
        return self._files.exists(path)

    def create(self, path: str, nbytes: int = 0) -> _RemoteWriter:
        return _RemoteWriter(self._files.open(path, "wb"))

    def open(self, path: str) -> _RemoteReader:
        self._files.invalidate_cache(path)
        return _RemoteReader(self._files, path)

    def read(self, path: str, most: int) -> bytes:
        if (nbytes := self._files.size(path)) > most:
            raise OSError(errno.EFBIG, f"the file has {nbytes} bytes, more than {most}", path)
        return self._files.cat_file(path)

    def sync_dir(self, path: str) -> None:
        """Does nothing: an object is stored when its writer has closed."""

    def remove_tree(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(path, recursive=True)


class _RemoteWriter:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, buffers: Sequence[Any]) -> None:
        for buffer in buffers:
            self._file.write(memoryview(buffer).cast("B"))

    def close(self) -> None:
        self._file.close()


class _RemoteReader:
    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path
        self.nbytes = files.size(path)

    def read_into(self, buffer: Any, start: int) -> None:
        view = memoryview(buffer).cast("B")
        data = self._files.cat_file(self._path, start=start, end=start + len(view)) if len(view) else b""
        if len(data) != len(view):
            raise EOFError
        view[:] = data

    def close(self) -> None:
        pass


Storage = LocalStorage | RemoteStorage


def storage_of(path: str | os.PathLike[str], operation: str) -> tuple[Storage, str]:
    """The storage of a path or URL, and the path in it. Raises StorageError for what is none."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    protocol, separator, rest = text.partition("://") if isinstance(text, str) else ("", "", "")
    if not (rest if separator else protocol):
        found = repr(text) if isinstance(text, str) else f"a {type(path).__name__}"
        raise StorageError(operation, f"the path is {found}, which names no directory", (), [("a path or a URL", "")])
    if not separator:
        return LocalStorage(), os.path.abspath(protocol)
    if protocol in ("file", "local"):
        return LocalStorage(), os.path.abspath(rest)
    try:
        return RemoteStorage(protocol), rest.rstrip("/")
    except (ValueError, ImportError) as error:
        raise _no_storage(operation, str(text), protocol, error) from error


def _no_storage(operation: str, path: str, protocol: str, error: Exception) -> StorageError:
    """The error for a URL of which fsspec knows no file system, or lacks what it needs for it."""
    from fsspec import available_protocols

    near = difflib.get_close_matches(protocol, available_protocols(), 1)
    remedies = [(f"{near[0]}://...", "fsspec knows it")] if near and near != [protocol] else []
    if isinstance(error, ImportError):
        remedies = [("install what it says", "fsspec's own list of what each protocol needs")]
    return StorageError(
        operation, f"fsspec opens no file system for {protocol}://: {error}", [f"path  {path}"],
        remedies or [("a path, or the URL of a protocol that fsspec knows", "fsspec.available_protocols()")],
    )  # fmt: skip


@contextlib.contextmanager
def guarded(operation: str, path: str, doing: str) -> Iterator[None]:
    """OSErrors within become StorageErrors that name the path and what was being done."""
    try:
        yield
    except EOFError as error:
        raise StorageError(operation, f"{doing}: the file ends too early", [f"path  {path}"]) from error
    except OSError as error:
        raise of_system(error, operation, path, doing) from error
