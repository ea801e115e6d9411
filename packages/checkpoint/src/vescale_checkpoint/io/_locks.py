"""Locks on directories (flock, gone with their process): who uses one, and that nobody deletes it meanwhile.

Where the file system has no locks everything counts as in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from ._storage import LocalStorage, Storage


@contextlib.contextmanager
def leased(storage: Storage, path: str) -> Iterator[bool]:
    """Within the block nobody deletes the directory `path`. False if it is not there (any more)."""
    if not isinstance(storage, LocalStorage):
        yield storage.exists(path)
        return
    try:
        lock = lock_of(path, fcntl.LOCK_SH)
    except OSError:  # a file system without locks: nothing is deleted there either
        yield True
        return
    with _held(lock):
        yield lock is not None


@contextlib.contextmanager
def unused(path: str) -> Iterator[bool]:
    """Yields whether nobody else uses the directory; if so, nobody will within the block."""
    try:
        lock = lock_of(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock = None
    with _held(lock):
        yield lock is not None


@contextlib.contextmanager
def _held(lock: int | None) -> Iterator[None]:
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def lock_of(path: str, how: int) -> int | None:
    """A descriptor that holds a lock on the directory; None if it was renamed or removed meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, how)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
