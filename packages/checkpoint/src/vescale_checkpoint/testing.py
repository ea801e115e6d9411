"""Test helpers of checkpoints: worlds whose ranks may be killed, and faults between this package and the system.

Needs cloudpickle, as vescale_dtensor.testing does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback

import torch
import torch.distributed as dist

from vescale_dtensor.testing import dumps, loads

from .io import _storage
from .sync import _presence

SILENT_S = 4.0  # the ranks of these worlds are taken for dead sooner, to save the tests' time


class World:
    """Fresh processes with a process group whose store lives here, as torchrun's does in its agent.

    after: an ended world in whose place this one comes, in the same store, as torchrun's next attempt does. (What torch
    itself left there is deleted: gloo would look for ranks that are dead.)
    """

    def __init__(self, size, function, args, after=None):
        self.size = size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "vescale_checkpoint"])
        self.store = after.store if after else dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        for key in self.store.list_keys() if after else ():
            if "vescale" not in key:
                self.store.delete_key(key)
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            call = dumps((function, args))
            process = context.Process(target=_rank, args=(theirs, rank, size, self.store.port, call))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def answers(self, timeout=60):
        """Per rank ("returned", value), ("raised", type name, text), or ("died", exit code)."""
        found = []
        for pipe, process in zip(self._pipes, self.processes):
            answer = None
            with contextlib.suppress(EOFError):
                if not pipe.poll(timeout):
                    raise TimeoutError(f"a rank of {self.size} gave no answer in {timeout} s")
                answer = pipe.recv()
            process.join(timeout)
            found.append(answer or ("died", process.exitcode))
        return found

    def close(self):
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(pipe, rank, size, port, call):
    torch.set_num_threads(1)
    _presence.SILENT_S, _presence.BEAT_S = SILENT_S, 0.2
    if size > 1:
        store = dist.TCPStore("127.0.0.1", port, None, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        function, args = loads(call)
        answer = ("returned", function(rank, *args))
    except BaseException as error:
        answer = ("raised", type(error).__name__, str(error), traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # the others of a world that lost a rank cannot end it in order


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
def intercepted(before):
    calls = Calls(before)
    _storage.os = calls
    try:
        yield calls
    finally:
        _storage.os = os


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
