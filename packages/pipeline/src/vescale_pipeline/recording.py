"""record_events: what this rank really did and when, for `draw` and for comparison with `simulate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .simulate import Event

_under_way: list[list[Event]] = []


@contextmanager
def record_events() -> Iterator[list[Event]]:
    """Gives a list that fills with the actions of this rank while the block runs; seconds of the host's clock.

    An action begins when what it waited for has arrived, so that gaps are idle time.
    Clocks are alike on all ranks of one machine: `draw` takes their lists joined.
    On an accelerator the times are those of the host, which runs ahead.

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
