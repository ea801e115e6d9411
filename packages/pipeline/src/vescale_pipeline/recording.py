"""record_events: what this rank really did and when, for `draw` and for comparison with `simulate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .simulate import Event

_under_way: list[list[Event]] = []


@contextmanager
def record_events() -> Iterator[list[Event]]:
    """Yields a list to which the actions of this rank are appended while the block runs, with times in seconds of the
    host's clock.

    An action begins when what it waited for has arrived, so gaps are idle time. Clocks are the same on all ranks of one
    machine: join their lists for `draw`. On an accelerator, the times are those of the host, which runs ahead.

    Example:
        >>> with record_events() as events:
        ...     model(batch).backward()
        >>> draw(events, "rank0.png")
    """
    events: list[Event] = []
    _under_way.append(events)
    try:
        yield events
    finally:
        _under_way[:] = [other for other in _under_way if other is not events]


def is_recording() -> bool:
    return bool(_under_way)


def note(event: Event) -> None:
    """Adds an event to all recordings under way."""
    for events in _under_way:
        events.append(event)
