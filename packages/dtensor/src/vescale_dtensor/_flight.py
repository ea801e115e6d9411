"""The last collectives of this rank, for whoever asks why it hangs: a flight recorder that is always on.

Cost per collective: a list of what is at hand, appended to a ring, and one word written when the host's wait for it
is over: under a microsecond, where a collective takes 5 of the host at least. Lines of code are not looked for: who
asks while the rank hangs finds them in the stacks of its threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic

from . import _events

EVENTS = 50
"""So many are kept."""
STARTED, WAITING, DONE = "under way", "waited for", "done"


class Line:
    """The ranks of a process group, the axes that they are a line of, and how many collectives they were asked for."""

    __slots__ = ("axes", "ranks", "count")

    def __init__(self, axes: Sequence[str], ranks: Sequence[int]) -> None:
        self.axes, self.ranks, self.count = tuple(axes), tuple(ranks), 0


def note(kind: str, line: Line, received: int, state: str) -> list:
    """One collective begins; set its [STATE] when it goes on. `received`: bytes."""
    line.count = number = line.count + 1
    entry = [state, kind, line, number, received, _events._current, _events._direction, monotonic()]
    ring.append(entry)
    return entry


STATE, BEGAN = 0, 7
ring: deque[list] = deque(maxlen=EVENTS)


def told(entry: list) -> dict:
    """An event as JSON has it."""
    state, kind, line, number, received, function, direction, began = entry
    cause = function if isinstance(function, _events.Cause) else _events.function_name(function)
    return {
        "number": number,
        "kind": kind,
        "axes": list(line.axes),
        "ranks": list(line.ranks),
        "bytes": received,
        "cause": f"{cause}" if isinstance(function, _events.Cause) else f"{cause} ({direction})",
        "state": state,
        "seconds_ago": round(monotonic() - began, 3),
    }
