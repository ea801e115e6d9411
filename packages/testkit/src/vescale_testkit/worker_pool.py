"""Worlds of gloo worker processes that outlive a single test.

A spawned rank pays for importing torch, which takes seconds; a test pays for a
few collectives, which take microseconds.  So the processes are kept:

    test process ---- control sockets ----> rank 0 .. rank n-1
         |                                      ^
         |                                      | forks
         +------- command socket -------> fork server

The fork server is a single-threaded process that imports torch once and then
forks the ranks of every world that is asked for.  It is our own and not that
of ``multiprocessing``, because the latter runs the caller's ``__main__`` again
in every child, does not pass ``sys.path`` on to what it preloads, and is shared
with everybody else in the process.

Rules that keep a broken test from harming the next one:

- No wait is unbounded: start-up, rendezvous, collectives, calls and shutdown
  have deadlines.
- A world is used again only if every rank answered and, after an exception,
  all its process groups still pass a barrier.  Otherwise it is killed, and the
  next call forks a new one.
- Nothing survives the test process.  Its death closes both kinds of sockets;
  the fork server then kills every rank that is left.  The death of the fork
  server kills the ranks as well (on Linux).

Cost, on two cores: one import of torch per session, 0.1 s per world of four,
1 ms per call on four ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any

from .worker import BOOTSTRAP, HEADER, START_SECONDS, Answer, check_groups, dumps

GRACE_SECONDS = 5.0  # after the first exception, for the other ranks to answer
DEATH_GRACE_SECONDS = 1.0  # the same after the death of a rank
CHECK_SECONDS = 3.0  # barrier on all groups after an exception
STOP_SECONDS = 5.0  # orderly exit, after which processes are killed

# The frames below the caller's function, at the end of a stack.
_OWN_FRAMES = re.compile(r'\n  File "[^"\n]*worker\.py", line \d+ in _answer(\n  File [^\n]*)*')


class WorldStartError(RuntimeError):
    """The fork server or a world of workers could not be started."""


class ForkServer:
    """The near end of the process that forks ranks."""

    def __init__(self, modules: tuple[str, ...] = ()) -> None:
        near, far = socket.socketpair()
        environment = dict(os.environ)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = "1"  # a thread in the fork server would be lost in its children
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if loopback:
            environment.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
        path = [entry or os.getcwd() for entry in sys.path]
        preload = ["vescale_testkit", *modules]
        arguments = [json.dumps(path), str(far.fileno()), json.dumps(preload)]
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, *arguments],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[far.fileno()],
            )
        self._command = near
        self.threads = -1  # in the fork server, at the last fork

    def fork(self, size: int, device: str, fds: list[int]) -> list[int]:
        """Fork the ranks of a world; returns their process ids."""
        reply = self._ask({"fork": size, "device": device}, START_SECONDS, fds)
        self.threads = reply["threads"]
        return reply["pids"]

    def reap(self, pids: list[int], seconds: float, *, kill: bool) -> dict[int, int | None]:
        """Exit codes by process id, killing now or after so many seconds."""
        reply = self._ask({"reap": pids, "seconds": seconds, "kill": kill}, seconds + 5.0)
        return {int(pid): code for pid, code in reply["codes"].items()}

    def _ask(self, request: dict[str, Any], seconds: float, fds: list[int] | None = None) -> Any:
        self._command.settimeout(seconds)
        try:
            socket.send_fds(self._command, [json.dumps(request).encode()], fds or [])
            reply = self._command.recv(1 << 20)
        except TimeoutError:
            reason = f"did not answer within {seconds:g} s"
        except OSError as error:
            reason = f"has gone ({error})"
        except BaseException:  # its answer would be taken for that to the next question
            self._process.kill()
            raise
        else:
            if reply:
                return json.loads(reply)
            reason = "has gone"
        self._process.kill()
        code = self._process.wait(5.0)
        raise WorldStartError(f"the fork server {reason}; exit code {code}, see its stderr")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Stop the process; ranks that are left die with it."""
        self._command.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5.0)


class Rank:
    """The near end of one worker process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = 0
        self.control, self.far = socket.socketpair()
        self.control.setblocking(False)
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._out = memoryview(b"")
        self._in = bytearray()
        self._in_view = memoryview(self._in)

    def post(self, request: bytes | None) -> None:
        """Queue a request, unless the rank speaks unasked, and expect an answer."""
        self._out = memoryview(b"" if request is None else HEADER.pack(len(request)) + request)
        self._expect(HEADER.size, is_header=True)

    def _expect(self, length: int, *, is_header: bool = False) -> None:
        self._in = bytearray(length)
        self._in_view = memoryview(self._in)
        self._in_header = is_header

    def push(self) -> bool:
        """Send what fits; whether all of the request is out."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # EOF shows on reading
            while self._out:
                self._out = self._out[self.control.send(self._out) :]
        return not self._out

    def pull(self) -> Answer | None:
        """Read what is there; the answer once it is complete."""
        while True:
            try:
                count = self.control.recv_into(self._in_view)
            except BlockingIOError:
                return None
            except ConnectionError:
                count = 0
            if not count:
                return Answer("died", time.monotonic(), self.rank, usable=False)
            self._in_view = self._in_view[count:]
            if not self._in_view:
                if not self._in_header:
                    return pickle.loads(self._in)
                self._expect(HEADER.unpack(self._in)[0])

    def read_stacks(self) -> str:
        """Returns what faulthandler wrote, in a fatal error or on request."""
        file = self.stacks.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace").rstrip()

    def dump_stacks(self) -> str:
        """Python stacks of a rank that does not answer."""
        file = self.stacks.fileno()
        before = size = os.fstat(file).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)  # not reaped yet, so the id is still its own
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            last, size = size, os.fstat(file).st_size
            if before < size == last:
                break
        stacks = os.pread(file, size - before, before).decode(errors="replace").rstrip()
        return _OWN_FRAMES.sub("", stacks)

    def close(self) -> None:
        self.control.close()
        self.stacks.close()


class World:
    """The ranks of one world size on one device, joined in its process group: gloo's, or the second device's own."""

    def __init__(self, server: ForkServer, size: int, device: str) -> None:
        self.size = size
        self.is_open = True
        self._server = server
        self._ranks = [Rank(rank) for rank in range(size)]
        self._selector = selectors.DefaultSelector()
        fds = [fd for rank in self._ranks for fd in (rank.far.fileno(), rank.stacks.fileno())]
        try:
            pids = server.fork(size, device, fds)
        except BaseException:
            for rank in self._ranks:
                rank.far.close()
                rank.close()
            raise
        for rank, pid in zip(self._ranks, pids, strict=True):
            rank.far.close()
            rank.pid = pid
            rank.post(None)
        answers = self._collect(START_SECONDS)
        for answer in answers:
            if answer.kind != "returned":
                self.close(kill=True)
                raise WorldStartError(
                    f"rank {answer.rank} of {size} could not join its world ({answer.kind})\n{answer.detail}"
                )

    def call(self, request: bytes, seconds: float) -> list[Answer]:
        """Answers in rank order; the world is open afterwards only if it is sound."""
        try:
            for rank in self._ranks:
                rank.post(request)
            answers = self._collect(seconds)
            sound = all(answer.usable for answer in answers)
            if sound and any(answer.kind == "raised" for answer in answers):
                sound = self._is_sound()
            if not sound:
                self.close(kill=True)
        except BaseException:  # such as KeyboardInterrupt: nobody knows what the ranks do now
            self.close(kill=True)
            raise
        return answers

    def _is_sound(self) -> bool:
        """True if all process groups still work, after an exception on some rank."""
        request = dumps((check_groups, (CHECK_SECONDS,), {}, ()))
        for rank in self._ranks:
            rank.post(request)
        answers = self._collect(CHECK_SECONDS + 2.0)
        return all(answer.kind == "returned" for answer in answers)

    def _collect(self, seconds: float) -> list[Answer]:
        """One answer per rank, waiting no longer than ``seconds``.

        From the first failure on, the others get no more than a grace.
        """
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            events = selectors.EVENT_READ
            if not rank.push():
                events |= selectors.EVENT_WRITE
            self._selector.register(rank.control, events, rank)
        try:
            while len(answers) < self.size:
                ready = self._selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    break
                for key, events in ready:
                    rank = key.data
                    if events & selectors.EVENT_WRITE and rank.push():
                        self._selector.modify(rank.control, selectors.EVENT_READ, rank)
                    if not events & selectors.EVENT_READ:
                        continue
                    answer = rank.pull()
                    if answer is None:
                        continue
                    answers[rank.rank] = answer
                    self._selector.unregister(rank.control)
                    if answer.kind != "returned":
                        more = DEATH_GRACE_SECONDS if answer.kind == "died" else GRACE_SECONDS
                        deadline = min(deadline, time.monotonic() + more)
        finally:
            for key in list(self._selector.get_map().values()):
                self._selector.unregister(key.fileobj)
        return [self._complete(rank, answers.get(rank.rank)) for rank in self._ranks]

    def _complete(self, rank: Rank, answer: Answer | None) -> Answer:
        """Add what only the system knows of a rank that did not answer."""
        if answer is None:
            stacks = rank.dump_stacks()
            return Answer("silent", time.monotonic(), rank.rank, detail=stacks, usable=False)
        if answer.kind == "died":
            code = self._server.reap([rank.pid], 2.0, kill=False).get(rank.pid)
            return replace(answer, exit_code=code, detail=rank.read_stacks())
        return answer

    def hang_up(self) -> None:
        """Let the ranks destroy their process groups and exit."""
        self.is_open = False
        for rank in self._ranks:
            rank.control.close()

    def close(self, *, kill: bool) -> None:
        """End all ranks, now or when they have destroyed their process groups."""
        self.hang_up()
        self._selector.close()
        with contextlib.suppress(WorldStartError):  # a fork server that has gone took its ranks along
            self._server.reap([rank.pid for rank in self._ranks], STOP_SECONDS, kill=kill)
        for rank in self._ranks:
            rank.close()


class Pool:
    """The fork server and the worlds of this process, made when first needed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._server: ForkServer | None = None
        self._worlds: dict[tuple[int, str], World] = {}
        self._owner = os.getpid()

    def server(self, modules: tuple[str, ...] = ()) -> ForkServer:
        """The fork server, started if need be, without waiting for its imports."""
        with self._lock:
            if self._owner != os.getpid():  # a fork of the test process has no pool yet
                self._server, self._worlds, self._owner = None, {}, os.getpid()
            if self._server is None or not self._server.is_running:
                self.close()
                self._server = ForkServer(modules)
            return self._server

    def call(self, size: int, device: str, request: bytes, seconds: float) -> list[Answer]:
        """Have every rank of a world of this size, on this device, do one call."""
        with self._lock:
            server = self.server()
            world = self._worlds.get((size, device))
            if world is None or not world.is_open:
                if device == "second":
                    _built()
                world = self._worlds[size, device] = World(server, size, device)
            return world.call(request, seconds)

    def end(self, size: int, device: str) -> None:
        """End the ranks of one world, which nobody knows to be sound: the next call of its size starts new ones."""
        with self._lock:
            world = self._worlds.pop((size, device), None)
            if world is not None and world.is_open:
                world.close(kill=True)

    def close(self) -> None:
        """End all processes; a later call starts new ones."""
        with self._lock:
            if self._owner != os.getpid() or self._server is None:
                return
            worlds = [world for world in self._worlds.values() if world.is_open]
            for world in worlds:
                world.hang_up()
            for world in worlds:
                world.close(kill=False)
            self._server.close()
            self._server, self._worlds = None, {}


def _built() -> None:
    """Compiles the second device, if nobody has: before the ranks' time runs."""
    from .second import BuildError, library

    try:
        library()
    except BuildError as error:
        raise WorldStartError(str(error)) from error


pool = Pool()
atexit.register(pool.close)
