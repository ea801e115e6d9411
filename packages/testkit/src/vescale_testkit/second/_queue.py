"""Queue of a communicator: one operation after the other, each when all that it needs of others has come.

A queue is a stream of its own: the host goes on when it has put something there, and an operation starts when the one
before it is done. Then it tells the ranks that it concerns, and ends when they have told the like. So what waits for
each other on a GPU waits here: two receives that face each other, a send without a receive, a collective that one rank
never makes; and what differs between the ranks is an error at once, on all of them, that names both.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ._wire import Message, Wire

changed = threading.Condition(threading.RLock())
"""Condition of all queues of the process: held to change one, notified when something ended."""
_queues: list[Queue] = []
_wire: Wire | None = None


def wire() -> Wire:
    global _wire
    if _wire is None:
        _wire = Wire(_advance)
    return _wire


def _advance() -> None:
    """Something has arrived."""
    with changed:
        for queue in _queues:
            queue.advance()
        changed.notify_all()


class DeviceError(RuntimeError):
    """Raised where a GPU would hang, compute garbage, or raise an error of NCCL."""


class Part(NamedTuple):
    """An operation's message to another rank, and the key of the one that it awaits."""

    rank: int
    sent_as: Any
    value: Any
    payload: bytes
    awaited: Any


class Operation:
    """An entry of a queue: a collective, a batch of sends and receives, or one of these.

    Arguments:
        label: what it is and who asked for it, for errors.
        parts: what it exchanges, with other ranks.
        ended: called with the messages that came, by place in `parts`; what it raises is the operation's error.
    """

    def __init__(self, label: str, parts: list[Part], ended: Callable[[list[Message]], None]) -> None:
        self.label, self._parts, self._ended = label, parts, ended
        self._missing = list(range(len(parts)))
        self._arrived: list[Message | None] = [None] * len(parts)
        self.started = self.done = False
        self.error: Exception | None = None

    def start(self, addresses: list[str]) -> None:
        self.started = True
        for part in self._parts:
            if part.sent_as is not None:
                wire().send(addresses[part.rank], part.sent_as, part.value, part.payload)

    def advance(self) -> bool:
        """Takes what has come; whether it is done."""
        if self._missing:
            for at in list(self._missing):
                if wire().has(self._parts[at].awaited):
                    self._arrived[at] = wire().take(self._parts[at].awaited)
                    self._missing.remove(at)
        if not self._missing and not self.done:
            self.done = True
            try:
                self._ended(self._arrived)
            except Exception as error:
                self.error = error
            self._parts = self._arrived = ()
        return self.done

    @property
    def waits_for(self) -> list[int]:
        """The ranks that have not told theirs."""
        return sorted({self._parts[at].rank for at in self._missing})

    def fail(self, error: Exception) -> None:
        if not self.done:
            self.done, self.error = True, error
            self._parts = self._arrived = ()
            self._missing = []


class Queue:
    """Operations of one communicator, or of one pair of its ranks.

    Arguments:
        name: for errors.
        addresses: of the communicator's ranks, for the wire.
    """

    def __init__(self, name: str, addresses: list[str]) -> None:
        self.name, self.addresses = name, addresses
        self._entries: deque[Operation] = deque()
        self.ended: deque[str] = deque(maxlen=5)
        with changed:
            _queues.append(self)

    def put(self, operation: Operation) -> None:
        with changed:
            self._entries.append(operation)
            self.advance()

    def advance(self) -> None:
        while self._entries:
            first = self._entries[0]
            if not first.started:
                first.start(self.addresses)
            if not first.advance():
                return
            self._entries.popleft()
            self.ended.append(first.label)
            changed.notify_all()

    @property
    def queued(self) -> list[Operation]:
        return list(self._entries)

    def fail(self, error: Exception) -> None:
        """Ends all that is queued, with an error."""
        with changed:
            for entry in self._entries:
                entry.fail(error)
            self._entries.clear()
            changed.notify_all()

    def close(self) -> None:
        with changed:
            if self in _queues:
                _queues.remove(self)


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Waits, without Python's lock, until `holds`; whether it came in time."""
    deadline = time.monotonic() + seconds
    with changed:
        while not holds():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            changed.wait(left)
    return True
