"""The last collectives and transfers of this rank, for whoever asks why it hangs: a flight recorder that is always on.

Cost per collective: a list of what is at hand, appended to a ring, and one word written when the host's wait for it
is over: under a microsecond, where a collective takes 5 of the host at least. Lines of code are not looked for: who
asks while the rank hangs finds them in the stacks of its threads. The entry is all that there is of a collective
between its beginning and its end: who listens is told from it (`events.py`), and a failure is its error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any
from weakref import WeakSet, ref

from .. import _effects as effects
from .._errors import CommunicationError, OperatorError
from . import events
from .collective_check import board_of
from .endings import connection_lost

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

    __slots__ = ("__weakref__", "axes", "board", "count", "mesh", "name", "of", "process_group", "ranks")

    def __init__(
        self,
        axes: Sequence[str],
        ranks: Sequence[int],
        of: str = COLLECTIVES,
        group: Any = None,
        mesh: str = "",
        name: str = "",
    ) -> None:
        self.axes, self.ranks, self.of, self.count = tuple(axes), tuple(ranks), of, 0
        self.mesh, self.name = mesh, name
        self.process_group = (lambda: None) if group is None else ref(group)  # no group may outlive the interpreter
        self.board = None if group is None or of != COLLECTIVES else board_of(group)
        rank_groups.add(self)

    @property
    def key(self) -> str:
        """The same on all ranks; a pipeline's is its own, for another one's messages may be called alike."""
        return f"{self.of} {self.axes} {self.ranks} {self.name}"


class Noted(list):
    """An entry: state, kind, group, number, bytes, who asked and in which direction, when it began, its event or None.

    A block under it is the host's wait: it ends the entry, and a RuntimeError of torch.distributed's becomes a
    CommunicationError.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        global waited_s
        if error is None:
            self[STATE] = DONE
            waited_s += monotonic() - self[BEGAN]
            if self[EVENT] is not None:
                events.finish(self[EVENT])
        elif isinstance(error, RuntimeError):
            raise self.failed(error) from error

    def waits(self) -> Noted:
        """The host's wait for it begins."""
        self[STATE], self[BEGAN] = WAITING, monotonic()
        return self

    def failed(self, error: RuntimeError) -> CommunicationError:
        self[STATE], group = FAILED, self[2]
        axes = ", ".join(map(repr, group.axes))
        rule = f"the collective over axis {axes} of {group.mesh} failed, asked for by {events.cause()}"
        return connection_lost(self[1], rule, error)


def note(kind: str, group: RankGroup, received: int, count: int | None = 1, state: str = WAITING) -> Noted:
    """One collective begins. `received`: bytes. `count`: as of an `Event`; None: traces do not hear of it.

    Raises CommunicationError where a rank of this machine has begun another one in its place, OperatorError while a
    graph is captured, which has no operator for it, and what listeners do.
    """
    if effects.captured is not None:
        raise OperatorError(kind, "a graph is captured, and what is captured sends nothing")
    event = None
    if events.listeners and count is not None:
        event = events.announce(kind, group.axes, received, count)
    group.count = number = group.count + 1
    if group.board is not None:
        group.board.post(kind, received, group)
    entry = Noted((state, kind, group, number, received, events._current, events._direction, monotonic(), event))
    ring.append(entry)
    return entry


def run(kind: str, group: RankGroup, received: int, call: Callable, *args: Any, count: int = 1) -> None:
    """Makes a collective, whose group's method is `call`, and waits for it."""
    noted = note(kind, group, received, count)
    try:
        call(*args).wait()
    except RuntimeError as error:
        raise noted.failed(error) from error
    noted.__exit__(None, None, None)


def own_s() -> float:
    """Returns the time of this rank's own, from some moment on: without what the host has waited for other ranks."""
    return monotonic() - waited_s


waited_s = 0.0
STATE, BEGAN, EVENT = 0, 7, 8
ring: deque[Noted] = deque(maxlen=EVENTS)
transfers: deque[Noted] = deque(maxlen=EVENTS)


class Transfers:
    """Notes the sends and receives of one pipeline: what its link tells of them (vescale_pipeline's `Recorder`).

    `name`: of its process group, the same on all of its ranks."""

    def __init__(self, axis: str, name: str) -> None:
        self._axis, self._name = axis, name
        self._rank_groups: dict[tuple, RankGroup] = {}

    def begin(self, message: Any, is_ordered: bool, received: int) -> Noted:
        """`message`: has a `source`, a `target` and a `call`, and the same text at both ends."""
        source, target = message.source, message.target
        pair = (source, target) if source < target else (target, source)
        group = self._rank_groups.get((pair, is_ordered))
        if group is None:
            of = TRANSFERS if is_ordered else MESSAGES
            group = self._rank_groups[pair, is_ordered] = RankGroup((self._axis,), pair, of, name=self._name)
        group.count = number = group.count + 1
        entry = Noted((STARTED, message, group, number, received, None, "", monotonic(), None))
        transfers.append(entry)
        return entry

    def waits(self, entry: Noted) -> None:
        entry.waits()

    def ended(self, entry: Noted) -> None:
        entry.__exit__(None, None, None)

    def failed(self, entry: Noted) -> None:
        entry[STATE] = FAILED


def told(entry: Noted) -> dict:
    """An event as JSON has it."""
    state, kind, group, number, received, function, direction, began, _ = entry
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
