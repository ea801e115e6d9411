"""Turns of ranks: one runs at a time, until it has to wait for another.

A rank that waits says for what, as a condition that anybody can test. So the next is found by looking, and where
nobody's condition holds all wait for each other: that is told at once, with what each waits for. Who ran last goes
first, so that a group which talks within itself goes on together while its memory is still in the processor's caches.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vescale_dtensor import CommunicationError
from vescale_dtensor.engine import user_line

from .state import RankState

_POLL_SECONDS = 0.005
_MOST_ASKING_SECONDS = 10.0  # that a rank asks the store, while no other can run


class Ended(BaseException):
    """Another rank failed; this one has nothing to wait for any more."""


@dataclass
class Wait:
    """A rank's wait."""

    condition: Callable[[], bool]
    what: Callable[[], str]
    thread: int
    yields: bool = False  # to anybody who has something to do: its condition holds always
    asks: bool = False  # again and again, by itself


class Turns:
    """The ranks of one simulation. Rank 0 runs in the thread that asked for it, and begins."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.failure: BaseException | None = None
        self.failed = 0
        self.raised: dict[int, Exception] = {}  # by ranks that have come to their end so, while the others went on
        self.current = 0
        self._tokens = [threading.Lock() for _ in range(ranks)]
        for token in self._tokens:
            token.acquire()
        self._states = [RankState(rank, ranks) for rank in range(ranks)]
        self._waits: list[Wait | None] = []
        self._ended: list[bool] = []
        self._threads: dict[int, int] = {}
        self._lately: list[int] = []  # every rank, who ran last first
        self._asks_since = self._asked_at = 0.0  # that nobody but ranks that ask the store could run; the last of them

    # --- a rank's life

    def start(self) -> None:
        """All ranks are about to begin, for the first time or again."""
        self._waits, self._ended = [None] * self.ranks, [False] * self.ranks
        self.failure, self.raised = None, {}
        self._threads, self.current = {threading.get_ident(): 0}, 0
        self._lately = list(range(self.ranks))
        self._asks_since = self._asked_at = 0.0

    def begin(self, rank: int) -> None:
        """Waits for the first turn, in the rank's thread."""
        self._threads[threading.get_ident()] = rank
        if rank:
            self._tokens[rank].acquire()
        self._states[rank].enter()

    def end(self, rank: int) -> None:
        """Hands over for good, in the rank's thread."""
        self._states[rank].leave()
        self._ended[rank] = True
        following = self._next(rank)
        if following is None and not all(self._ended):
            self.fail(rank, self._deadlock())
            following = self._next(rank)
        if following is not None:
            self._give(following)

    def fail(self, rank: int, error: BaseException) -> None:
        """Ends all ranks, each at its next wait; the first cause counts: what others have raised before."""
        if self.failure is None:
            self.failed, self.failure = next(iter(self.raised.items()), (rank, error))

    # --- waiting

    def wait_until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """Others run until `condition` holds.

        Raises CommunicationError, on all ranks, where every rank waits for another.
        """
        rank = self._threads.get(threading.get_ident())
        if rank is None:  # a thread that the program made
            while not condition() and self.failure is None:
                time.sleep(_POLL_SECONDS)
            return
        if self.failure is not None:
            raise Ended
        if condition():
            return
        self._waits[rank] = Wait(condition, what, threading.get_ident())
        following = self._next(rank)
        if following is None:
            error = self._deadlock()
            self.fail(rank, error)
            self._waits[rank] = None
            raise Ended if self.raised else error
        self._hand_over(rank, following)
        self._waits[rank] = None
        if self.failure is not None:
            raise Ended

    def wait(self, seconds: float) -> None:
        """Others run, if they can; else lets time pass."""
        rank = self._threads.get(threading.get_ident())
        if rank is not None and self.failure is not None:
            raise Ended
        following = None if rank is None else self._next(rank)
        if following in (None, rank):
            time.sleep(seconds)
            return
        self._let(rank, following, Wait(lambda: True, lambda: "the debugger", threading.get_ident(), True))

    def ask_again(self, what: Callable[[], str]) -> None:
        """Lets others run before a rank asks again for what is not there yet.

        Raises CommunicationError, on all ranks, where for ten seconds nobody could run but who asks.
        """
        rank = self._threads.get(threading.get_ident())
        if rank is None:
            return
        if self.failure is not None:
            raise Ended
        following = self._next(rank)
        asks = {other for other, wait in enumerate(self._waits) if wait is not None and wait.asks} | {rank}
        now = time.monotonic()
        if following not in (None, *asks) or now - self._asked_at > 1.0:  # who asks seldom does other things
            self._asks_since = now
        self._asked_at = now
        if now - self._asks_since > _MOST_ASKING_SECONDS:
            self._waits[rank] = Wait(lambda: True, what, threading.get_ident(), True, True)
            error = self._deadlock()
            self.fail(rank, error)
            self._waits[rank] = None
            raise Ended if self.raised else error
        if following not in (None, rank):
            self._let(rank, following, Wait(lambda: True, what, threading.get_ident(), True, True))

    def place(self, rank: int) -> str:
        """Describes a rank's place, in words."""
        wait = self._waits[rank]
        if self._ended[rank]:
            return "it came to its end"
        if wait is None:
            return "it has not begun"
        return f"it waits in {wait.what()} at {user_line(sys._current_frames().get(wait.thread))}"

    # --- inside

    def _let(self, rank: int, following: int, wait: Wait) -> None:
        """Another runs, whatever this one waits for."""
        self._waits[rank] = wait
        self._hand_over(rank, following)
        self._waits[rank] = None
        if self.failure is not None:
            raise Ended

    def _next(self, rank: int) -> int | None:
        """Returns the rank that runs after this one. Those who yield take turns, after all others."""
        for other in self._lately:
            wait = self._waits[other]
            if (wait is None and other != rank or wait is not None and not wait.yields) and self._may_run(other):
                return other
        around = [*range(rank + 1, self.ranks), *range(rank + 1)]
        return next((other for other in around if self._waits[other] is not None and self._may_run(other)), None)

    def _may_run(self, rank: int) -> bool:
        wait = self._waits[rank]
        return not self._ended[rank] and (self.failure is not None or wait is None or wait.condition())

    def _hand_over(self, rank: int, following: int) -> None:
        if following == rank:
            return
        self._states[rank].leave()
        self._give(following)
        self._tokens[rank].acquire()
        self._states[rank].enter()

    def _give(self, rank: int) -> None:
        self.current = rank
        self._lately.remove(rank)
        self._lately.insert(0, rank)
        self._tokens[rank].release()

    def _deadlock(self) -> CommunicationError:
        places = [f"rank {rank}: {self.place(rank)}" for rank in range(self.ranks)]
        shown = places[:16] + [f"... {len(places) - 16} ranks more"] * (len(places) > 16)
        return CommunicationError(
            "simulate",
            "every rank is waiting for another, or has ended",
            shown,
            [("the same collectives, in the same order, on all ranks of a group", "")],
        )
