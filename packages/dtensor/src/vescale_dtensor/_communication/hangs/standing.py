"""The place of this rank's main thread, as its watch sees it: at which lines of the user's, in which call, how long.

What nobody tells is seen in the thread's stack: a call of torch.distributed that the user made, a compilation. The
stack is read as text, from `faulthandler`: whoever holds another thread's frames, be it for a moment, keeps alive what
they refer to, such as a graph that the program takes for gone.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sysconfig
import tempfile
import threading
import time
from typing import NamedTuple

from ..events import is_user_code

_MOVING = 1e-2
"""The share of a processor from which on a thread moves, in a loop perhaps, though found at one line each time."""
_MOST_LINES = 30
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+).*\n(?P<calls>(?:  .*\n)*)", re.MULTILINE)
_CALL = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_BUSY = {
    f"{os.sep}torch{os.sep}_inductor{os.sep}": "compiling",
    f"{os.sep}vescale_checkpoint{os.sep}": "saving or loading",
}
_LIBRARIES = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "purelib"))


class Seen(NamedTuple):
    """A stack. `lines`: the user's, innermost first. `call`: of torch.distributed that the innermost of them is in, ""
    without one. `busy`: with what that is no wait, though it may look like one. `mark`: differs when it has moved."""

    lines: list[str]
    call: str = ""
    busy: str = ""
    mark: str = ""

    @property
    def place(self) -> str:
        return self.lines[0] if self.lines else "no line of the user's"


def _stack(thread: int | None) -> str:
    """Returns a thread's at most 100 innermost calls as text; "" without such a thread."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode()
    return next((one["calls"] for one in _THREAD.finditer(text) if int(one["ident"], 16) == thread), "")


def seen(thread: int | None) -> Seen:
    """Returns a thread's stack. Lines of installed libraries count where the program has none."""
    stack = _stack(thread)
    lines: list[str] = []
    libraries: list[str] = []
    call = busy = ""
    for path, line, name in _CALL.findall(stack):
        if is_user_code(path):
            found = libraries if path.startswith(_LIBRARIES) else lines
            found.append(f"{path}:{line} in {name}")
        elif not lines:
            if not call and _DISTRIBUTED in path:
                call = name
            busy = busy or next((what for folder, what in _BUSY.items() if folder in path), "")
    return Seen((lines or libraries)[:_MOST_LINES], call, busy, stack)


class MainThread:
    """The main thread, looked at again and again. `moving`: see _MOVING."""

    def __init__(self, moving: float = _MOVING) -> None:
        self._moving = moving
        self.ident = threading.main_thread().ident
        self.seen, self.stood_s = Seen([]), 0.0
        self._since = self._then = time.monotonic()
        self._spent = 0.0

    def look(self, waits: bool) -> None:
        """`waits`: whether it waits for another rank; it may spin then."""
        now, spent = time.monotonic(), self._processor_seconds()
        works = (spent - self._spent) / max(now - self._then, 1e-3) > self._moving
        found = seen(self.ident)
        if (works and not waits) or found.mark != self.seen.mark:
            self._since = now
        self.seen, self.stood_s, self._then, self._spent = found, now - self._since, now, spent

    def _processor_seconds(self) -> float:
        """That the thread has used."""
        clock = getattr(time, "pthread_getcpuclockid", None)
        return 0.0 if clock is None else time.clock_gettime(clock(self.ident))
