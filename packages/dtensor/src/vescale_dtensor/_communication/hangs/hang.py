"""The watch of a rank: that ranks which wait for each other in vain end, and say who differs since when.

A thread says every second where this rank stands (`words.py`), and looks what its host waits for: a communication that
the recorder has (`../flight_recorder.py`), a call of torch.distributed that the user made (`standing.py`), or an
accelerator that is busy with one. While it waits, it listens to the ranks that it waits for. Time counts in which none
of them moves, compiles, saves or loads; all time counts for the backend's own limit.

    after 4 s       it is written down for the others, and a circle of waits, which is a deadlock, ends (`deadlock.py`)
    after 10 s      a line on stderr says where each of them is
    at the bound    every rank writes what it is in; one verdict (`disagreements.py`) says which ranks disagree, since
                    which communication, asked for by which lines of code. It is the first cause of the errors that
                    the ranks get, whose connections are closed
    30 s later      a rank that has not come back from where it was, in a loop or at a lock, is ended

So end the waits for a rank of which nothing has been heard for SILENT_S. The bound is a little below that of the
backend, whose own end of a hang may be the process's.

    VESCALE_HANG_SECONDS    the bound; 90% of the backend's without it
    VESCALE_HANG_DIR        where the files go; "vescale_hang" without it
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from vescale_trace.environment import seconds

from ..._debugger.session import answer_where, is_open
from ..._torch_private import _dump_nccl_trace_json, all_groups, backend_timeouts
from .. import deaths
from .. import flight_recorder as recorder
from ..endings import close, tell_first
from ..namespace import ALONE, await_namespace
from .deadlock import deadlocked
from .disagreements import compared
from .standing import MainThread, seen
from .words import Word, beat_seconds, heard, last_seen, say

WRITTEN_S, TOLD_S = 4.0, 10.0
SILENT_S = 60.0
"""Seconds that a rank of which nothing is heard is waited for."""
LEFT_S = 30.0
"""Seconds that a rank has to come back from where a hang has found it: as many as torchrun gives."""
_STARTS = 10
"""Beats in which the last rank has begun its watch, as a rule."""
_SEEN, _REPORT, _WAITS = "hang", "hang/report", "waits"
_LAST = 0.95
"""The part of the backends' time limit that a wait takes at most: they would end it without a word about the others."""
_MOST = 64
"""Ranks that are listened to, of those that a rank waits for."""
Heard = Mapping[int, tuple[Word | None, float]]
"""The last words of ranks, and for how many seconds nothing else was heard."""
_READ = ". A value of all ranks is read on all of them: value = loss.item() before `if rank == 0:`"


class Looker(Protocol):
    """Somebody else who looks, in the watch's thread: no other rank's word may be missed while the host waits."""

    def look(self, watch: Watch) -> None:
        """Once a beat. A RuntimeError of the store's goes on."""

    def lost(self, watch: Watch, why: str) -> None:
        """Called once what ranks wait for will not come: ends the waits that are this one's."""


class Wait(NamedTuple):
    """A wait of this rank's host: for what, in words; for which ranks; the recorder's entry, or the mark of a stack."""

    what: str
    ranks: Sequence[int]
    mark: Any


def watch_for_hangs() -> None:
    """Starts this process's watch over its joined world; again does nothing. Not in a world without processes. Every
    rank calls it."""
    global _watch
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() in ALONE:
        return
    if _watch is None or _watch.world is not dist.group.WORLD:
        if _watch is not None:
            _watch.close()
        _watch = Watch()


def look_with(looker: Looker) -> None:
    """Adds `looker`, which looks until it is collected; does nothing in a world without a watch."""
    watch_for_hangs()
    if _watch is not None and dist.get_world_size() > 1 and dist.get_backend() not in ALONE:
        _watch.lookers.add(looker)


def verdict() -> str | None:
    """Names the ranks that disagreed, and the collective since which they did; None while no hang was seen."""
    return None if _watch is None else _watch.verdict


def bound_seconds() -> float:
    """Returns how long a wait may take."""
    given = seconds("VESCALE_HANG_SECONDS", None)
    return given if given is not None else 0.9 * min(backend_timeouts(), default=600.0)


def _last_seconds(wait: Wait, world: dist.ProcessGroup) -> float:
    """Returns how long a wait may take for ranks that move: a little less than its backend's, or any, if that is not
    known."""
    groups = [wait.mark[2].process_group() or world] if isinstance(wait.mark, list) else all_groups()
    return _LAST * max((limit for group in groups for limit in backend_timeouts(group)), default=math.inf)


class Watch:
    """The thread of one world, and what it found."""

    def __init__(self) -> None:
        self.world, self.verdict = dist.group.WORLD, None
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = await_namespace().store.clone()  # torch locks its own while it waits
        self.main, self.lookers = MainThread(), WeakSet[Looker]()
        self.silent_s = SILENT_S
        self._bound, self._count = bound_seconds(), 0
        self._wait: Wait | None = None
        self._waited = self._counted = 0.0  # of that wait: seconds, and those that count
        self._own: dict[str, Any] | None = None  # what was written of it
        self.ran = 0.0  # seconds that this process looked: while it was stopped it heard nobody
        self._heard: dict[int, tuple[Word | None, float]] = {}  # the last word of a rank, and when it was new by `ran`
        self._moved = (0, time.monotonic())  # this rank's last collective, and when it was new here
        self._say()  # who stops before the first look is known to have come
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vescale-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1)
            with contextlib.suppress(RuntimeError):
                say(self.store, self.rank, Word(self._count + 1, has_ended=True))

    def _run(self) -> None:
        pause = min(beat_seconds(self.size), max(self._bound / 4, 0.05))
        asked, looked, newest = None, time.monotonic(), 0
        while not self._ended.wait(pause):
            now = time.monotonic()
            elapsed, looked = min(now - looked, 2 * pause), now
            self.ran += elapsed
            try:
                newest, before = id(recorder.ring[-1]) if recorder.ring else 0, newest
                self.main.look(self._wait is not None, newest != before)
                self._follow(now)
                self._say()
                if self._count < _STARTS:
                    deaths.remember(self.store)
                asked = answer_where(self.store, self.rank, asked, self._place)
                self._look()
                why = self._trouble(elapsed, pause) if self._wait is not None else None
                if why is not None:
                    self.store.compare_set(_SEEN, "", why)
                if why is not None or self.store.check([_SEEN]):
                    why = self.store.get(_SEEN).decode()  # of whoever found it first, on all ranks
                    self._report(pause)
                    cause = f"{why}: {self.verdict}{_READ if ' at read ' in self.verdict else ''}"
                    # A thread of its own: connections may not close while a call of torch's makes another.
                    threading.Thread(target=self._outlast, args=(cause,), daemon=True).start()
                    return (tell_first if self._wait is None else self.end)(cause)
            except RuntimeError:  # the store is gone, and the world with it
                self._lose("the process that holds the ranks' store does not answer: see what ended it")
                return

    def end(self, why: str) -> None:
        """Ends all waits of this rank, and with its connections those of ranks that wait for it. `why`: the first cause
        of what they get, unless another one is known."""
        tell_first(why)
        self._lose(why)
        for group in all_groups():
            close(group)

    def _outlast(self, cause: str) -> None:
        """Ends the process if it stays for LEFT_S where it was at the verdict: in a loop, at a lock, in a call of
        torch's that no closed connection ends. On one machine torchrun would; on others nobody does."""
        before = seen(self.main.ident)
        if self._ended.wait(LEFT_S) or dist.group.WORLD is not self.world or seen(self.main.ident).has_left(before):
            return
        print(f"vescale: rank {self.rank} is ended, still at {before.place}: {cause}", file=sys.stderr, flush=True)
        os._exit(1)

    def _look(self) -> None:
        for looker in list(self.lookers):
            looker.look(self)

    def _lose(self, why: str) -> None:
        for looker in list(self.lookers):
            looker.lost(self, why)

    def silent(self, words: Heard) -> str | None:
        """Returns that one of these ranks has stopped, in words; None where all are heard, or have ended."""
        for rank, (word, silent) in words.items():
            if word is not None and not word.has_ended and silent > self.silent_s:
                return f"rank {rank} fell silent: rank {self.rank} saw no sign of life for {self.silent_s:g} s"
        return None

    def hear(self, ranks: Sequence[int]) -> Heard:
        """The last words of other ranks, and for how many seconds each is the last."""
        for rank, word in heard(self.store, ranks):
            if rank not in self._heard or self._heard[rank][0] != word:
                self._heard[rank] = word, self.ran
        return {rank: (self._heard[rank][0], self.ran - self._heard[rank][1]) for rank in ranks}

    # --- what this rank is in

    def _say(self) -> None:
        self._count += 1
        seen = self.main.seen
        say(self.store, self.rank, Word(self._count, seen.place, self.main.stood_s, self._call(), seen.busy))

    def _call(self) -> str:
        return "" if self._wait is None else self._wait.what

    def _place(self) -> str:
        """Describes this rank's place, in a line."""
        waits = f", waiting in {self._call()}" if self._wait is not None else ""
        return f"it is at {seen(self.main.ident).place}{waits}"

    def _follow(self, now: float) -> None:
        """Notes what the host waits for now."""
        events = sorted([*recorder.ring, *recorder.transfers], key=lambda event: event[recorder.BEGAN])
        waiting = [event for event in events if event[recorder.STATE] == recorder.WAITING]
        found = None
        if events and self._moved[0] != id(events[-1]):
            self._moved = id(events[-1]), now
        if waiting:
            kind, group = waiting[-1][1], waiting[-1][2]
            found = Wait(f"{kind} over axis {', '.join(group.axes)}", group.ranks, waiting[-1])
        elif self.main.seen.call:
            found = Wait(self.main.seen.call, range(self.size), self.main.seen.mark)
        elif events and now - self._moved[1] > WRITTEN_S and _device_is_busy():
            found = Wait(f"{events[-1][1]} on the device", events[-1][2].ranks, events[-1])
        if found is None or self._wait is None or found.mark is not self._wait.mark and found.mark != self._wait.mark:
            self._waited, self._counted, self._own = 0.0, 0.0, None
        self._wait = found

    def _trouble(self, elapsed: float, pause: float) -> str | None:
        """Returns why the wait of this rank is to end, in a few words; None: it may go on."""
        ranks = [rank for rank in self._wait.ranks if rank != self.rank][:_MOST]
        words = self.hear(ranks)
        if (why := self.silent(words)) is not None:
            return why
        before, self._waited = self._counted, self._waited + elapsed
        if not any(_moves(word, silent, 2 * pause) for word, silent in words.values()):
            self._counted += elapsed
        if self._waited < min(WRITTEN_S, self._bound) or is_open(self.store):
            return None
        if self._own is None:
            self._own = report(self.rank, self.main.ident)
            self.store.set(f"{_WAITS}/{self.rank}", json.dumps(self._own))
        if deadlocked(self._own, lambda rank: self._written(_WAITS, rank)):
            return f"rank {self.rank} found a deadlock"
        if before < TOLD_S <= self._counted and not any(
            rank < self.rank and word is not None and word.waits for rank, (word, _) in words.items()
        ):
            self._tell(words)
        return "a hang" if self._counted > self._bound or self._waited > _last_seconds(self._wait, self.world) else None

    def _tell(self, words: Heard) -> None:
        """On stderr, by the first rank that waits."""
        others = [f"rank {rank} {'has not come' if word is None else word}" for rank, (word, _) in words.items()]
        print(
            f"vescale: rank {self.rank} has waited for {self._counted:.0f} s in {self._call()}, at "
            f"{self.main.seen.place}, until {self._bound:g} s (VESCALE_HANG_SECONDS); {'; '.join(others[:8])}",
            file=sys.stderr,
            flush=True,
        )

    def _written(self, key: str, rank: int) -> dict[str, Any] | None:
        key = f"{key}/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _report(self, pause: float) -> None:
        own = report(self.rank, self.main.ident)
        self.store.set(f"{_REPORT}/{self.rank}", json.dumps(own))
        reports, until = {self.rank: own}, time.monotonic() + 2 * pause + 2
        while len(reports) < self.size and time.monotonic() < until:
            for rank in range(self.size):
                if rank not in reports and (one := self._written(_REPORT, rank)) is not None:
                    reports[rank] = one
            time.sleep(0.05)
        silent = last_seen(self.store, (rank for rank in range(self.size) if rank not in reports))
        self.verdict = compared(reports, self.size, silent)
        path = Path(os.environ.get("VESCALE_HANG_DIR", "vescale_hang")) / f"rank{self.rank}.txt"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(written(self.verdict, own))
        print(f"vescale: rank {self.rank} hangs: {self.verdict}\nvescale: see {path}", file=sys.stderr, flush=True)


def _moves(word: Word | None, silent: float, lately: float) -> bool:
    """Returns whether a rank may still come: time in which it does something counts for nobody."""
    if word is None or word.has_ended or silent > lately:
        return False
    return bool(word.busy) or (word.stood_s < lately and not word.waits)


def _device_is_busy() -> bool:
    """True if the accelerator's default stream, which waits for every collective that is waited for, has work left."""
    if not torch.accelerator.is_available():
        return False
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    query = getattr(getattr(module, "default_stream", lambda: None)(), "query", None)
    return query is not None and not query()


def report(rank: int, main: int | None) -> dict[str, Any]:
    """Returns what a rank is in: where its code stands, the communications it waits for, its last events, newest first,
    and how far it has come with each group."""
    events = [recorder.told(one) for ring in (recorder.ring, recorder.transfers) for one in list(ring)[::-1]]
    stack = seen(main)
    found: dict[str, Any] = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "lines": stack.lines,
        "call": stack.call,
        "waiting": [event for event in events if event["state"] == recorder.WAITING],
        "events": events,
        "counts": recorder.counts(),
    }
    if _dump_nccl_trace_json is not None:
        with contextlib.suppress(Exception):  # torch's own recorder, where it keeps one
            found["torch"] = json.loads(_dump_nccl_trace_json(True, True))
    return found


def written(text: str, one: Mapping[str, Any]) -> str:
    """A rank's file."""
    head = [text, "", f"rank {one['rank']} on {one['host']}, process {one['pid']}", *map("  {}".format, one["lines"])]
    rows = [
        f"{e['of']:10} {e['number']:8} {e['kind']:15} axis {','.join(e['axes']):10} {e['bytes']:12,} B  "
        f"{e['state']:10} {e['seconds_ago']:9.3f} s ago  {e['cause']}"
        for e in one["events"]
    ]
    more = ["", "torch's flight recorder:", json.dumps(one["torch"], indent=1)] if "torch" in one else []
    return "\n".join([*head, "", "last collectives, and transfers, newest first:", *rows, *more]) + "\n"


_watch: Watch | None = None
