"""This rank's end of a communicator: its queues, what it was asked for and not yet waited for, and its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import _work
from ._extension import extension
from ._memory import Flight
from ._queue import DeviceError, Operation, Queue, changed, wait_until, wire
from ._sites import asker
from ._work import Work


class Communicator:
    """The common part of collectives and transfers."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        store.set(f"second/{rank}", wire().address)
        self._addresses = [store.get(f"second/{other}").decode() for other in range(size)]
        if rank == 0:
            store.set("second/name", f"{os.getpid()}-{id(self)}")
        self._name = store.get("second/name").decode()
        self._main = Queue("the communicator", self._addresses)
        self._pairs: dict[int, Queue] = {}
        self._numbers: dict[Any, int] = {}
        self._batch: list[tuple[str, Tensor, int, str]] | None = None
        self._closed: str | None = None
        self.calls = 0
        self.undelivered: dict[int, Work] = {}

    def set_timeout(self, seconds: float) -> None:
        pass

    def abort(self) -> None:
        self._close("aborted")
        for queue in (self._main, *self._pairs.values()):
            queue.fail(DeviceError("second: NCCL communicator was aborted on this rank"))
            queue.close()

    def shutdown(self) -> None:
        """Waits for what is queued; after `HANG_SECONDS` raises DeviceError where NCCL would go on waiting."""
        if self._closed:
            return
        queues = (self._main, *self._pairs.values())
        ended = wait_until(lambda: not any(queue.queued for queue in queues), _work.HANG_SECONDS)
        queued = [entry.label for queue in queues for entry in queue.queued]
        self.abort()
        self._closed = "destroyed"
        if not ended:
            raise DeviceError("second: to destroy a group hangs while something is queued:\n  " + "\n  ".join(queued))

    def _close(self, how: str) -> None:
        self._closed = self._closed or how
        if self in groups:
            groups.remove(self)

    def what_hangs(self, operation: Operation, seconds: float) -> str:
        with changed:
            queue = next((q for q in (self._main, *self._pairs.values()) if operation in q.queued), self._main)
            first = queue.queued[0] if queue.queued else operation
            lines = [f"second: rank {self.rank} of {self.size} waited {seconds:g} s for {operation.label}"]
            if first is not operation:
                lines.append(f"  before it in its queue  {first.label}")
            lines.append(f"  not there  rank {', '.join(map(str, first.waits_for))}")
            lines += [f"  done before  {label}" for label in queue.ended]
        return "\n".join(lines)

    def _next(self, what: Any) -> int:
        number = self._numbers.get(what, 0)
        self._numbers[what] = number + 1
        self.calls += 1
        return number

    def _started(self, operation: Operation, flight: Flight, deliver: Callable[[], None]) -> Work:
        return Work(self.calls, self.undelivered, self.what_hangs, operation, flight, deliver)

    def _check_open(self, kind: str) -> None:
        if self._closed:
            raise DeviceError(f"second: {kind} on a group that was {self._closed}, asked for by {asked_by()}")


def asked_by() -> str:
    """Names who asks, as snapshots and errors do."""
    return asker(sys._getframe(1))


groups: list[Communicator] = []
"""All groups of this process that were not destroyed."""


def check_at_rest() -> None:
    """Raises DeviceError where something was started, in any group of this process, and never waited for, or where
    streams met over memory that was given back, or over the host's."""
    left = [work.label for group in groups for work in group.undelivered.values()]
    if left:
        raise DeviceError("second: started, and never waited for:\n  " + "\n  ".join(left))
    if races := extension().races():
        raise DeviceError("\n".join(dict.fromkeys(races)))


def forget_undelivered() -> None:
    for group in groups:
        group.undelivered.clear()
