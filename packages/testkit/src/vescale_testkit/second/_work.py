"""A call in flight: what waiting for it checks, delivers and raises."""

from __future__ import annotations

from collections.abc import Callable

from vescale_trace.environment import seconds

from ._extension import extension
from ._memory import Flight, InFlightError
from ._queue import DeviceError, Operation, wait_until

HANG_SECONDS = seconds("VESCALE_SECOND_HANG_SECONDS", 20.0)


class Work:
    """A call in flight.

    Arguments:
        number: counts the calls of its group.
        undelivered: those of the group that nobody has waited for; it enters itself.
        what_hangs: the group's text for an operation that did not end within so many seconds.
        deliver: writes what arrived to the call's outputs.
    """

    def __init__(
        self,
        number: int,
        undelivered: dict[int, Work],
        what_hangs: Callable[[Operation, float], str],
        operation: Operation,
        flight: Flight,
        deliver: Callable[[], None],
    ) -> None:
        self.number, self._undelivered, self._what_hangs = number, undelivered, what_hangs
        self._operation, self._flight, self._deliver = operation, flight, deliver
        self._polls = 2
        undelivered[id(self)] = self

    @property
    def label(self) -> str:
        return self._operation.label

    def is_completed(self) -> bool:
        """Answers as late as can be: a poll or two after it is true."""
        if self._operation.done and self._polls:
            self._polls -= 1
            return False
        return self._operation.done

    def wait(self, timeout: float | None = None) -> None:
        """Raises DeviceError where it does not end, InFlightError where its memory was written meanwhile."""
        if timeout is not None:
            extension().note("wait(timeout)")
        self.end(HANG_SECONDS if timeout is None else min(timeout, HANG_SECONDS))

    def end(self, seconds: float) -> None:
        if id(self) not in self._undelivered:
            return
        if not wait_until(lambda: self._operation.done, seconds):
            raise DeviceError(self._what_hangs(self._operation, seconds))
        del self._undelivered[id(self)]
        flight, deliver, self._deliver = self._flight, self._deliver, None
        if self._operation.error is not None:
            raise self._operation.error
        written = flight.check()
        flight.end()
        if written:
            raise InFlightError(f"second: the {written} of {self.label} was written while it was in flight")
        deliver()
