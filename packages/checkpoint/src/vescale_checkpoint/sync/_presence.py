"""Signs of life of a rank, and where it stands: what ranks that wait for each other need to know. Pure but for the
store.

Every rank beats into the store as long as its process group lives, not only during an
operation: so a rank that died since the last one is named within seconds. A beat says
which operation the rank is in, or else which line of the user's program its main thread
stands at, and for how long. Rank 0 looks at all beats, the others at rank 0's: two or three
requests per rank and beat, however many ranks there are.

A rank that is late is waited for as long as its program moves; one that stands at one
line for PATIENCE_S will not come, as a rank does that waits for those who wait for it here.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from atexit import register
from collections.abc import Iterator
from typing import Any, NamedTuple

from vescale_dtensor.engine import MainThread
from vescale_trace.environment import seconds

BEAT_S, IDLE_BEAT_S = 0.5, 1.0  # how often a rank shows that it lives: in an operation, and else
SILENT_S, IDLE_SILENT_S = 6.0, 10.0  # and after how long it is taken for dead
PATIENCE_S = 25.0  # how much later than the first a rank may come that stands at one line
LONG_PATIENCE_S = 300.0  # or one that moves
PATIENCE = "VESCALE_CHECKPOINT_PATIENCE_S"  # the variable that gives both
_MISSING = "\0"
_ROOT = "vescale_checkpoint/beat"


class Beat(NamedTuple):
    """A rank's sign of life: a growing count; its last operation's number and name, and whether that is over; the
    user's line at which its main thread stands, for how many seconds; whether its process has ended."""

    count: int
    number: int
    operation: str
    is_over: bool
    place: str
    stood_s: float
    has_ended: bool = False

    def __str__(self) -> str:
        if self.has_ended:
            return "its program has ended"
        where = f"in {self.operation}" if not self.is_over else f"not in {self.operation}" if self.operation else ""
        return f"{where + ', ' if where else ''}at {self.place} for {self.stood_s:.0f} s"


class Presence:
    """This rank's beats and what it knows of the others', for one process group.

    Arguments: a connection to the store that nobody else holds a lock of. `begin` starts the beats.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._given = seconds(PATIENCE, None)
        self.store, self.rank, self.size = store, rank, size
        self.number, self.operation, self.is_over = -1, "", True
        self.watched = 0.0  # seconds that this process has been looking: while it was stopped it saw nobody be silent
        self.on_silent: Any = None  # called with a rank that rank 0 takes for dead
        self._seen: dict[int, tuple[Beat | None, float]] = {}  # rank -> its last beat, and when it was new by `watched`
        self._is_fresh = False  # whether it was looked at in this operation: who was silent before it may be back
        self._count, self._looked = 0, time.monotonic()
        self._main = MainThread(moving=2e-4)
        self._others = range(1, size) if rank == 0 else range(1)
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Raises RuntimeError where the store is gone."""
        if self.rank == 0 and self.store.has_extended_api():
            # All keys are to be there, to be read at once; a beat that is there stays: it may be the last one.
            for rank in range(1, self.size):
                self.store.compare_set(f"{_ROOT}/{rank}", "", _MISSING)
        self.beat()
        self._thread = threading.Thread(target=self._keep_beating, name="vescale-checkpoint-beat", daemon=True)
        self._thread.start()
        _living.add(self)

    def enter(self, number: int, operation: str) -> None:
        """This rank begins an operation."""
        self.number, self.operation, self.is_over = number, operation, False
        self._is_fresh = False
        self._wake.set()

    def leave(self) -> None:
        self.is_over, self.on_silent = True, None

    def end(self) -> None:
        """The last beat; returns when the thread is gone."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        with contextlib.suppress(RuntimeError):
            self.beat(has_ended=True)

    def beat(self, *, has_ended: bool = False) -> None:
        """One request."""
        self._count += 1
        place, stood = self._place()
        said = Beat(self._count, self.number, self.operation, self.is_over, place, stood, has_ended)
        self.store.set(f"{_ROOT}/{self.rank}", json.dumps(said))

    def watch(self) -> None:
        """Looks at the beats of those that this rank waits for: one request, with a store that can read many keys."""
        now = time.monotonic()
        elapsed, self._looked = now - self._looked, now
        self.watched += min(elapsed, 2 * BEAT_S)
        found = list(self.read(self._others))
        for rank, beat in found:
            last, _ = self._seen.get(rank, (_MISSING, 0.0))
            if beat != last:
                self._seen[rank] = (beat, self.watched)
        self._is_fresh = True
        for rank, beat in found:
            if self.on_silent is not None and beat is not None and not beat.is_over and self.is_silent(rank):
                self.on_silent(rank)

    def read(self, ranks: Any) -> Iterator[tuple[int, Beat | None]]:
        """The last beats of some ranks; None of one that never beat."""
        keys = [f"{_ROOT}/{rank}" for rank in ranks]
        if self.rank == 0 and len(keys) > 1 and self.store.has_extended_api():
            found = self.store.multi_get(keys)
        else:
            found = [peek(self.store, key) for key in keys]
        for rank, data in zip(ranks, found):
            yield rank, None if data in (None, _MISSING.encode()) else Beat(*json.loads(data))

    def last(self, rank: int) -> Beat | None:
        """Returns the last beat of a rank that `watch` saw; None before it has looked in this operation."""
        return self._seen.get(rank, (None, 0.0))[0] if self._is_fresh else None

    def is_silent(self, rank: int) -> bool:
        """True if a rank that has beaten is taken for dead."""
        beat = self.last(rank)
        if beat is None or beat.has_ended:
            return False
        return self.watched - self._seen[rank][1] > (IDLE_SILENT_S if beat.is_over else SILENT_S)

    def reason_against(self, rank: int, waited_s: float) -> str | None:
        """Says why a rank that this one has waited for will not come. None: it may."""
        beat = self.last(rank)
        patience, long_patience = self._given or PATIENCE_S, self._given or LONG_PATIENCE_S
        if beat is None:
            return f"did not come within {patience:g} s" if waited_s > patience else None
        if beat.has_ended:
            return "has ended its program"
        if self.is_silent(rank):
            return f"fell silent: no sign of life for {IDLE_SILENT_S if beat.is_over else SILENT_S:g} s"
        if beat.number == self.number and beat.operation != self.operation:
            return f"calls {beat.operation} where this one calls {self.operation}"
        if beat.number >= self.number:
            return None
        if waited_s > long_patience or (waited_s > patience and beat.stood_s > patience):
            return f"did not come within {waited_s:.0f} s"
        return None

    def _keep_beating(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(IDLE_BEAT_S if self.is_over else BEAT_S)
            self._wake.clear()
            if self._ended.is_set():
                return
            try:
                self.beat()
                if not self.is_over:
                    self.watch()
            except RuntimeError:  # the store is gone; whoever waits finds out by itself
                return

    def _place(self) -> tuple[str, float]:
        """Returns the line of the user's program that the main thread is at, and for how long it has not moved."""
        self._main.look(bool(self._main.seen.call))
        return os.path.basename(self._main.seen.place), self._main.stood_s


def peek(store: Any, key: str) -> bytes | None:
    """A key's value, or None if it has none: one request, which does not wait."""
    found = store.compare_set(key, _MISSING, _MISSING)
    return None if found == _MISSING.encode() else found


_living: weakref.WeakSet[Presence] = weakref.WeakSet()


def _end_all() -> None:
    for presence in list(_living):
        presence.end()


register(_end_all)
