"""Faults between a module and the system: calls that fail, that kill, or that do a part of what they are asked for."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

# The system calls that change what is on disk, in the modules that make them.
CHANGES = ("open", "mkdir", "makedirs", "writev", "fdatasync", "fsync", "rename")


class Calls:
    """Stands for the os module: counts the calls that change the disk, and asks `before` about each."""

    def __init__(self, before):
        self._before, self.count, self._lock = before, 0, threading.Lock()

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in CHANGES:
            return real

        def call(*args, **kwargs):
            with self._lock:
                self.count += 1
                number = self.count
            instead = self._before(number, name, args)
            return real(*args, **kwargs) if instead is None else instead()

        return call


@contextlib.contextmanager
def intercepted(module, before):
    """Within the block `before` is asked about each change of the disk that a module makes by its `os`."""
    module.os = calls = Calls(before)
    try:
        yield calls
    finally:
        module.os = os


def killed_at(number):
    """Makes `intercepted` send SIGKILL to this process just before its `number`-th change of the disk."""

    def before(at, name, args):
        if at == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def failing(name, code, on=lambda args: True):
    """Makes `intercepted` fail calls of `name` that `on` picks, with an errno."""

    def before(at, called, args):
        if called == name and on(args):

            def fail():
                raise OSError(code, os.strerror(code))

            return fail

    return before


def short_writes(most):
    """Makes `intercepted` write at most `most` bytes a call."""

    def before(at, called, args):
        if called == "writev":
            descriptor, views = args
            return lambda: os.write(descriptor, next(view for view in views if len(view))[:most])

    return before
