"""The last collectives and transfers of this rank, for whoever asks why it hangs: a flight recorder that is always on.

Cost per collective: a list of what is at hand, appended to a ring, and one word written when the host's wait for it
is over: under a microsecond, where a collective takes 5 of the host at least. Lines of code are not looked for: who
asks while the rank hangs finds them in the stacks of its threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any
from weakref import WeakSet, ref

from .. import _effects as effects
from .._errors import CommunicationError, OperatorError
from . import events
from .collective_check import board_of

EVENTS = 50
"""So many are kept."""
STARTED, WAITING, DONE, FAILED = "under way", "waited for", "done", "failed"


COLLECTIVES, TRANSFERS, MESSAGES, READS, BLOCKS = "collective", "transfer", "message", "read", "block"


rank_groups: WeakSet[RankGroup] = WeakSet()


class RankGroup:
    """The ranks of a process group, the axes that they lie along, and how many collectives they were asked for.

    `of` tells what: collectives; reads by the host (`reads.py`); blocks of keys and values; transfers of two ranks,
    which match in the order in which both post them; or messages of two ranks, which are known by what they are called.
    """

    __slots__ = ("__weakref__", "axes", "board", "count", "of", "process_group", "ranks")

    def __init__(self, axes: Sequence[str], ranks: Sequence[int], of: str = COLLECTIVES, group: Any = None) -> None:
        self.axes, self.ranks, self.of, self.count = tuple(axes), tuple(ranks), of, 0
        self.process_group = (lambda: None) if group is None else ref(group)  # no group may outlive the interpreter
        self.board = None if group is None or of != COLLECTIVES else board_of(group)
        rank_groups.add(self)

    @property
    def key(self) -> str:
        """The same on all ranks."""
        return f"{self.of} {self.axes} {self.ranks}"


def note(kind: str, group: RankGroup, received: int, state: str) -> list:
    """One collective begins; set its [STATE] when it goes on. `received`: bytes. Raises CommunicationError where a
    rank of this machine has begun another one in its place, OperatorError while a graph is captured, which has no
    operator for it."""
    if effects.captured is not None:
        raise OperatorError(kind, "a graph is captured, and what is captured sends nothing")
    group.count = number = group.count + 1
    entry = [state, kind, group, number, received, events._current, events._direction, monotonic()]
    ring.append(entry)
    if group.board is not None:
        try:
            group.board.post(kind, received, group.axes, group.process_group())
        except CommunicationError:
            entry[STATE] = FAILED
            raise
    return entry


def done(entry: list) -> None:
    """The host's wait for it is over."""
    global waited_s
    entry[STATE] = DONE
    waited_s += monotonic() - entry[BEGAN]


def own_s() -> float:
    """Returns the time of this rank's own, from some moment on: without what the host has waited for other ranks."""
    return monotonic() - waited_s


waited_s = 0.0
STATE, BEGAN = 0, 7
ring: deque[list] = deque(maxlen=EVENTS)
transfers: deque[list] = deque(maxlen=EVENTS)


class Transfers:
    """Notes the sends and receives of one pipeline: what its link tells of them (vescale_pipeline's `Recorder`)."""

    def __init__(self, axis: str) -> None:
        self._axis = axis
        self._rank_groups: dict[tuple, RankGroup] = {}

    def begin(self, message: Any, is_ordered: bool, received: int) -> list:
        """`message`: has a `source`, a `target` and a `call`, and the same text at both ends."""
        source, target = message.source, message.target
        pair = (source, target) if source < target else (target, source)
        group = self._rank_groups.get((pair, is_ordered))
        if group is None:
            of = TRANSFERS if is_ordered else MESSAGES
            group = self._rank_groups[pair, is_ordered] = RankGroup((self._axis,), pair, of)
        group.count = number = group.count + 1
        entry = [STARTED, message, group, number, received, None, "", monotonic()]
        transfers.append(entry)
        return entry

    def waits(self, entry: list) -> None:
        entry[STATE], entry[BEGAN] = WAITING, monotonic()

    def ended(self, entry: list) -> None:
        done(entry)

    def failed(self, entry: list) -> None:
        entry[STATE] = FAILED


def told(entry: list) -> dict:
    """An event as JSON has it."""
    state, kind, group, number, received, function, direction, began = entry
    more: dict = {}
    if group.of in (TRANSFERS, MESSAGES):
        cause, more = "the schedule", {"way": [kind.source, kind.target], "call": kind.call}
    elif isinstance(function, events.Cause):
        cause = f"{function}"
    else:
        cause = f"{events.function_name(function)} ({direction})"
    return {
        "of": group.of,
        "key": group.key,
        "number": number,
        "kind": str(kind),
        "axes": list(group.axes),
        "ranks": list(group.ranks),
        "bytes": received,
        "cause": cause,
        "state": state,
        "seconds_ago": round(monotonic() - began, 3),
        **more,
    }


def counts() -> dict[str, int]:
    """Returns how far this rank has come, by the groups' keys. Of meshes with the same axes and ranks the most: a
    rank is rather taken to have begun what it has not."""
    found: dict[str, int] = {}
    for group in list(rank_groups):
        found[group.key] = max(group.count, found.get(group.key, 0))
    return found
