"""Explains a hang: when a wait passes its bound, every rank writes what it is in, and one verdict compares them.

A thread looks, every few seconds, for two things: a collective or a transfer between stages of a pipeline that this
rank's host waits for, or an accelerator that is busy with one, for longer than `bound_seconds`; and word in the store
that another rank has seen that. Then it puts what this rank is in and its last collectives and transfers
(`flight_recorder.py`) into the store, waits a little for the others', and writes a file: which ranks disagree, since
which communication (`disagreements.py`), and asked for by which lines of code. Errors about the broken connections that
follow say the same (`verdict`). The bound is below that of the backend, whose own end of a hang
may be the process's.

    VESCALE_HANG_SECONDS    the bound; 80% of the backend's without it
    VESCALE_HANG_DIR        where the files go; "vescale_hang" without it
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vescale_trace.environment import seconds

from ..._debugger.session import answer_where, is_open
from ..._torch_private import _dump_nccl_trace_json, backend_timeouts
from .. import flight_recorder as recorder
from ..endings import close, tell_first
from ..events import is_users
from ..namespace import ALONE, await_namespace
from .deadlock import Waits
from .disagreements import compared

LOOK_S, LOOKS_PER_S = 2.0, 200
"""A rank looks so often, and all of them together so often at most: a look is one request to the store."""
_SEEN, _REPORT = "hang", "hang/report"
_MOST_STACK = 30
_READ = ". A value of all ranks is read on all of them: value = loss.item() before `if rank == 0:`"


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


def verdict() -> str | None:
    """Names the ranks that disagreed, and the collective since which they did; None while no hang was seen."""
    return None if _watch is None else _watch.verdict


def bound_seconds() -> float:
    """Returns how long a wait may take."""
    given = seconds("VESCALE_HANG_SECONDS", None)
    if given is not None:
        return given
    return min([480.0, *[0.8 * bound for bound in backend_timeouts()]])


class Watch:
    """The thread of one world, and what it found."""

    def __init__(self) -> None:
        self.world, self.verdict = dist.group.WORLD, None
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = await_namespace().store.clone()  # torch locks its own while it waits
        self._bound = bound_seconds()
        self._waits = Waits(self._store, self._rank)
        self._ended = threading.Event()
        self._moved = (0, time.monotonic())  # this rank's last collective, and when it was new here
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._look, name="vescale-hang", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1)

    def _look(self) -> None:
        pause = min(max(LOOK_S, self._size / LOOKS_PER_S), max(self._bound / 4, 0.05))
        asked = None
        while not self._ended.wait(pause):
            try:
                asked = answer_where(self._store, self._rank, asked, self._place)
                deadlock = self._waits.look()
                stuck = (deadlock is not None or self._is_stuck()) and not is_open(self._store)
                if stuck:
                    self._store.compare_set(_SEEN, "", str(self._rank))
                if stuck or self._store.check([_SEEN]):
                    self._report(pause)
                    if stuck and deadlock is not None:
                        self._end(deadlock)
                    return
            except RuntimeError:  # the store is gone, and the world with it
                return

    def _end(self, group: recorder.RankGroup) -> None:
        """Ends the wait of this rank in a deadlock, and with its connections that of the ranks which wait for it."""
        tell_first(f"rank {self._rank} found a deadlock: {self.verdict}{_READ if ' at read ' in self.verdict else ''}")
        if (process_group := group.process_group()) is not None:
            close(process_group)

    def _place(self) -> str:
        """Describes this rank's place, in a line."""
        waits = [
            f"in {entry[1]} over axis {', '.join(entry[2].axes)}"
            for entry in list(recorder.ring)
            if entry[recorder.STATE] == recorder.WAITING
        ]
        at = next(iter(_user_lines(self._main)), "no line of the user's")
        return ", waiting ".join([f"it is at {at}", *waits[-1:]])

    def _is_stuck(self) -> bool:
        """True if the host waits for a collective for too long, or the device for one that came last."""
        events = sorted([*recorder.ring, *recorder.transfers], key=lambda event: event[recorder.BEGAN])
        if not events:
            return False
        now = time.monotonic()
        begun = now - self._bound
        if any(event[recorder.STATE] == recorder.WAITING and event[recorder.BEGAN] < begun for event in events):
            return True
        last = id(events[-1])
        if self._moved[0] != last:
            self._moved = last, now
        return now - self._moved[1] > self._bound and _device_is_busy()

    def _report(self, pause: float) -> None:
        own = report(self._rank, self._main)
        self._store.set(f"{_REPORT}/{self._rank}", json.dumps(own))
        reports, until = {self._rank: own}, time.monotonic() + 2 * pause + 2
        while len(reports) < self._size and time.monotonic() < until:
            for rank in range(self._size):
                if rank not in reports and self._store.check([f"{_REPORT}/{rank}"]):
                    reports[rank] = json.loads(self._store.get(f"{_REPORT}/{rank}"))
            time.sleep(0.05)
        self.verdict = compared(reports, self._size)
        path = Path(os.environ.get("VESCALE_HANG_DIR", "vescale_hang")) / f"rank{self._rank}.txt"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(written(self.verdict, own))
        print(f"vescale: rank {self._rank} hangs: {self.verdict}\nvescale: see {path}", file=sys.stderr, flush=True)


def _device_is_busy() -> bool:
    """True if the accelerator's default stream, which waits for every collective that is waited for, has work left."""
    if not torch.accelerator.is_available():
        return False
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    query = getattr(getattr(module, "default_stream", lambda: None)(), "query", None)
    return query is not None and not query()


def report(rank: int, main: int | None) -> dict[str, Any]:
    """Reports a rank: where its code stands, the collectives it waits for, its last events, newest first."""
    events = [recorder.told(one) for ring in (recorder.ring, recorder.transfers) for one in list(ring)[::-1]]
    found: dict[str, Any] = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "lines": _user_lines(main),
        "waiting": [event for event in events if event["state"] == recorder.WAITING],
        "events": events,
    }
    if _dump_nccl_trace_json is not None:
        with contextlib.suppress(Exception):  # torch's own recorder, where it keeps one
            found["torch"] = json.loads(_dump_nccl_trace_json(True, True))
    return found


def _user_lines(main: int | None) -> list[str]:
    """The user's lines that the main thread is in, innermost first."""
    frame, lines = sys._current_frames().get(main), []
    while frame is not None and len(lines) < _MOST_STACK:
        if is_users(frame):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines


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
