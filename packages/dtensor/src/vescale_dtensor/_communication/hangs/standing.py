"""The place of this rank's main thread, as its watch sees it: at which lines of the user's, in which call, how long.

What nobody tells is seen in the thread's stack: a call of torch.distributed that the user made, a compilation.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from typing import Any, NamedTuple

from vescale_trace.stack import frames, is_users, module_of

from .words import NOWHERE

_MOVING = 1e-2
"""The share of a processor from which on a thread moves, in a loop perhaps, though found at one line each time."""
_MOST_LINES = 30
_BUSY = {"torch._inductor.": "compiling", "vescale_checkpoint.": "saving or loading"}
_LIBRARIES = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "purelib"))


class Seen(NamedTuple):
    """A stack. `lines`: the user's, innermost first. `call`: of torch.distributed that the innermost of them is in, ""
    without one. `busy`: with what that is no wait, though it may look like one. `mark`: differs when it has moved.
    `running`: which calls of functions the lines are in."""

    lines: list[str]
    call: str = ""
    busy: str = ""
    mark: Any = None
    running: tuple[tuple[int, str], ...] = ()

    @property
    def place(self) -> str:
        return self.lines[0] if self.lines else NOWHERE

    def has_left(self, before: Seen) -> bool:
        """True if the function is over in which the thread was `before`."""
        return before.running[:1] not in {(one,) for one in self.running}


def seen(thread: int | None) -> Seen:
    """Returns a thread's stack. Lines of installed libraries count where the program has none."""
    frame = sys._current_frames().get(thread)  # type: ignore[arg-type]
    mark = None if frame is None else (id(frame), frame.f_code, frame.f_lasti)
    programs: list[tuple[str, tuple[int, str]]] = []
    libraries: list[tuple[str, tuple[int, str]]] = []
    call = busy = ""
    for one in () if frame is None else frames(frame):
        code, module = one.f_code, module_of(one)
        if len(programs) == _MOST_LINES:
            break
        if is_users(one):
            found = libraries if code.co_filename.startswith(_LIBRARIES) else programs
            found.append((f"{code.co_filename}:{one.f_lineno} in {code.co_name}", (id(one), code.co_name)))
        elif not programs:
            public = one.f_globals.get("__all__", ()) if module.startswith("torch.distributed.") else None
            if public is not None and (not call or code.co_name in public):
                call = code.co_name  # the outermost that has a public name
            busy = busy or next((what for name, what in _BUSY.items() if module.startswith(name)), "")
    lines = programs or libraries[:_MOST_LINES]
    return Seen([line for line, _ in lines], call, busy, mark, tuple(running for _, running in lines))


class MainThread:
    """The main thread, looked at again and again. `moving`: see _MOVING."""

    def __init__(self, moving: float = _MOVING) -> None:
        self._moving = moving
        self.ident = threading.main_thread().ident
        self.seen, self.stood_s = Seen([]), 0.0
        self._since = self._then = time.monotonic()
        self._spent = 0.0

    def look(self, waits: bool, came: bool = False) -> None:
        """`waits`: whether it waits for another rank; it may spin then. `came`: whether it is known to have moved.

        The stack of a thread that works is left alone: whoever holds its frames keeps alive what they refer to, such as
        a graph that the program takes for gone. It is where it was found last, or further."""
        now, spent = time.monotonic(), self._processor_seconds()
        used = (spent - self._spent) / max(now - self._then, 1e-3)
        works = came or used > self._moving
        found = self.seen._replace(call="", busy="") if works else seen(self.ident)
        if (works and not waits) or found.mark != self.seen.mark:
            self._since = now
        self.seen, self.stood_s, self._then, self._spent = found, now - self._since, now, spent

    def _processor_seconds(self) -> float:
        """That the thread has used."""
        clock = getattr(time, "pthread_getcpuclockid", None)
        return 0.0 if clock is None else time.clock_gettime(clock(self.ident))
