"""Exchange between ranks that stand at a line: a log of commands in the store.

The driving rank writes what was typed, number after number; every rank executes the log in order and answers each
entry. So a rank that comes late, while the others still stand there, executes what it missed first. Nothing is sent
through a process group: no collective is under way, and none can time out, however long a person thinks.

    name/at/<rank>          it has come; and where it stands
    name/line/<n>           command n, and the ranks that were there when it was typed
    name/out/<n>/<rank>     what the rank had to say before command n
    name/end                the others have gone on
    beat/<rank>             a number that grows while the rank stands at a line: who stops beating is gone
    open                    "1" while the driver stands: waits of other ranks are then no hang
    where, where/<n>/<rank> a question, and where a rank that did not come is instead (answered by `hang.Watch`)
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch.distributed as dist

from .._communication.endings import first_ending
from .._communication.hangs.words import named_ranks
from .._communication.namespace import namespace
from .._errors import CommunicationError

ARRIVAL_SECONDS = 10.0
"""So long the driver waits, at each stop, for ranks that are not there yet."""
BEAT_SECONDS = 1.0
GONE_SECONDS = 20.0
"""A rank whose beat was not heard for so long is gone."""
_PREFIX = "stop/"
_SLOWEST_LOOK = 0.2


class Wire:
    """The store of the world, under names of our own; or a connection to it for a thread, as torch locks a store while
    it waits. What is put before this rank knows the world's names is put once it does; until then nothing is there."""

    def __init__(self, own: dist.Store | None = None) -> None:
        self._own = own
        self._early: dict[str, str] = {}

    def another(self) -> Wire:
        """Returns a wire for another thread."""
        store = self._store()
        return Wire(None if store is None else store.clone())

    def _store(self) -> dist.Store | None:
        if self._own is not None:
            return self._own
        found = namespace()
        if found is None:
            return None
        for key, text in self._early.items():
            found.store.set(key, text)
        self._early.clear()
        return found.store

    def put(self, key: str, text: str) -> None:
        store = self._store()
        if store is None:
            self._early[_PREFIX + key] = text
        else:
            store.set(_PREFIX + key, text)

    def has(self, key: str) -> bool:
        store = self._store()
        return store is not None and store.check([_PREFIX + key])

    def get(self, key: str) -> str | None:
        return self._store().get(_PREFIX + key).decode() if self.has(key) else None


def world() -> tuple[int, int]:
    """(rank, size); (0, 1) where nobody has joined."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Simulation(Protocol):
    """A world whose ranks take turns in one process."""

    def wait(self, seconds: float) -> None:
        """Lets the others run."""

    def place(self, rank: int) -> str:
        """Says where a rank is."""


simulation: Simulation | None = None


def wait(seconds: float) -> None:
    """Lets time pass."""
    (time.sleep if simulation is None else simulation.wait)(seconds)


class Stop:
    """One stop of this rank. `name` says which, the same on all ranks that come to it."""

    def __init__(self, wire: Wire, name: str, rank: int, size: int, driver: int) -> None:
        self.wire, self.name, self.rank, self.size, self.driver = wire, name, rank, size, driver
        self.number = 0  # of the next command
        self.present = {rank}
        self._beats: Beats | NoBeats | None = None

    @property
    def drives(self) -> bool:
        return self.rank == self.driver

    @property
    def is_over(self) -> bool:
        """True if the driver has gone on already."""
        return self.size > 1 and self.wire.has(f"{self.name}/end")

    @property
    def absent(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.present]

    def arrive(self, place: str, tell: Callable[[str], None]) -> None:
        """This rank stands here. On the driver: waits for the others, `ARRIVAL_SECONDS` at most, and tells of those
        that do not come where they are."""
        if self.size == 1:
            return
        self.wire.put(f"{self.name}/at/{self.rank}", place)
        watched = range(self.size) if self.drives else [self.driver]
        beats = Beats if simulation is None else NoBeats
        self._beats = beats(self.wire, self.rank, watched, tell if self.drives else None)
        if not self.drives:
            return
        self.wire.put("open", "1")
        until = time.monotonic() + ARRIVAL_SECONDS
        self._look_for(lambda: not self._came() or time.monotonic() > until)
        for rank, where in self._places(self.absent).items():
            tell(f"rank {rank} has not come to this line: {where}")

    def answer(self, text: str) -> None:
        """Says this rank's word before the next command."""
        if self.size > 1:
            self.wire.put(f"{self.name}/out/{self.number}/{self.rank}", text)

    def answers(self, tell: Callable[[str], None]) -> dict[int, str]:
        """Returns, on the driver, what all that are here have to say, once all have; whoever came late is here from now
        on."""
        if self.size == 1:
            return {}
        for rank in self._came() & set(self.absent):
            if self.wire.has(f"{self.name}/at/{rank}"):
                self.present.add(rank)
                if self.number:
                    tell(f"rank {rank} has come, and executes what was typed until now")
        found: dict[int, str] = {}

        def all_said() -> bool:
            for rank in self.present - {self.rank} - found.keys():
                text = self.wire.get(f"{self.name}/out/{self.number}/{rank}")
                if text is not None:
                    found[rank] = text
                elif rank in self._beats.gone:
                    self.present.discard(rank)
                    return False
            return found.keys() >= self.present - {self.rank}

        told = time.monotonic()

        def patient() -> bool:
            nonlocal told
            if time.monotonic() - told > ARRIVAL_SECONDS:
                told = time.monotonic()
                late = sorted(self.present - found.keys() - {self.rank})
                tell(f"waiting for {named_ranks(late)} to execute it")
            return all_said()

        self._look_for(patient)
        return found

    def send(self, line: str) -> None:
        """Sends, on the driver, the next command."""
        if self.size > 1:
            self.present -= self._beats.gone
            self.wire.put(f"{self.name}/line/{self.number}", json.dumps([line, sorted(self.present)]))
        self.number += 1

    def receive(self) -> str | None:
        """Returns, on the others, the next command, once it was typed; None if the driver does not come to this line.

        Raises CommunicationError when the driver is gone.
        """
        key, until = f"{self.name}/line/{self.number}", time.monotonic() + 2 * ARRIVAL_SECONDS

        def is_decided() -> bool:
            return self.wire.has(key) or self.driver in self._beats.gone or (not came() and time.monotonic() > until)

        def came() -> bool:
            return self.number > 0 or self.wire.has(f"{self.name}/at/{self.driver}")

        self._look_for(is_decided)
        if not self.wire.has(key):
            if not came():
                return None
            raise self._lost()
        line, present = json.loads(self.wire.get(key))
        self.present = set(present)
        self.number += 1
        return line

    def leave(self) -> None:
        """This rank goes on."""
        if self._beats is not None:
            self._beats.close()
        if self.size == 1:
            return
        self.answer("")
        if self.drives:
            self.wire.put(f"{self.name}/end", "1")
            self.wire.put("open", "0")

    def gone(self, rank: int) -> bool:
        return self._beats is not None and rank in self._beats.gone

    def has_executed(self, rank: int) -> bool:
        """True if a rank is through with the command that this one executes."""
        return self.wire.has(f"{self.name}/out/{self.number}/{rank}")

    def _came(self) -> set[int]:
        """Moves who has come to `present`; returns those that have not, and are alive."""
        if self.number == 0:
            for rank in self.absent:
                if self.wire.has(f"{self.name}/at/{rank}"):
                    self.present.add(rank)
        return set(self.absent) - self._beats.gone

    def _places(self, ranks: Iterable[int]) -> dict[int, str]:
        ranks = list(ranks)
        if not ranks:
            return {}
        if simulation is not None:
            return {rank: simulation.place(rank) for rank in ranks}
        number = int(self.wire.get("where") or 0) + 1
        self.wire.put("where", str(number))
        found: dict[int, str] = {}
        until = time.monotonic() + 5

        def all_told() -> bool:
            for rank in ranks:
                if rank not in found and (text := self.wire.get(f"where/{number}/{rank}")) is not None:
                    found[rank] = text
            return len(found) == len(ranks) or time.monotonic() > until

        self._look_for(all_told)
        ending = first_ending()
        silent = "it does not say where it is" + (f"; {ending}" if ending else "")
        return {rank: found.get(rank, silent) for rank in ranks}

    def _lost(self) -> CommunicationError:
        ending = first_ending()
        said = [f"first cause: {ending}"] if ending else []
        return CommunicationError(
            "breakpoint",
            f"rank {self.driver}, where the debugger is driven, is gone: no sign of it for {GONE_SECONDS:g} s",
            said,
            [("mend the first cause and start again", "")] if ending else [("start again", "")],
        )

    def _look_for(self, found: Callable[[], bool]) -> None:
        """Waits until something is so.

        Raises CommunicationError when the store is gone, which lives in the process of a rank or of torchrun.
        """
        pause = 0.005
        try:
            while not found():
                wait(pause)
                pause = min(pause * 1.5, _SLOWEST_LOOK)
        except dist.DistError as error:
            raise self._lost() from error


class Beats:
    """A thread that says that this rank is alive, and listens for others while this one stands at a line."""

    def __init__(self, wire: Wire, rank: int, others: Iterable[int], tell: Callable[[str], None] | None) -> None:
        self.gone: set[int] = set()
        self._rank, self._tell = rank, tell
        self._heard: dict[int, tuple[Any, float]] = {
            other: (None, time.monotonic()) for other in others if other != rank
        }
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(wire.another(),), name="vescale-beat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _beat(self, wire: Wire) -> None:
        number = 0
        with contextlib.suppress(RuntimeError):  # the store is gone, and the world with it
            while not self._ended.is_set():
                number += 1
                wire.put(f"beat/{self._rank}", f"{number}-{id(self)}")
                self._listen(wire)
                self._ended.wait(BEAT_SECONDS)
            return
        self.gone.update(self._heard)

    def _listen(self, wire: Wire) -> None:
        now = time.monotonic()
        for other, (last, when) in list(self._heard.items()):
            said = wire.get(f"beat/{other}")
            if said != last:
                self._heard[other] = said, now
            elif last is not None and now - when > GONE_SECONDS and other not in self.gone:
                self.gone.add(other)
                if self._tell is not None:
                    ending = first_ending()
                    self._tell(f"rank {other} is gone, while the others stand here" + (f": {ending}" if ending else ""))


class NoBeats:
    """Signs of life of ranks that live and end together."""

    def __init__(self, *_: Any) -> None:
        self.gone: set[int] = set()

    def close(self) -> None:
        """Does nothing: nothing was begun."""


def answer_where(store: dist.Store, rank: int, answered: str | None, place: Callable[[], str]) -> str | None:
    """Says where this rank is, if the driver of a stop has asked since; returns the question that was answered."""
    wire = Wire(store)
    asked = wire.get("where")
    if asked is not None and asked != answered:
        wire.put(f"where/{asked}/{rank}", place())
    return asked


def is_open(store: dist.Store) -> bool:
    """True if a person debugs: then others wait, and do not hang."""
    return Wire(store).get("open") == "1"
