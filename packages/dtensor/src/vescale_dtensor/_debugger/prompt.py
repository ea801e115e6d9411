"""Python's debugger, fed by the driving rank.

`Pdb` reads commands from a stream and writes to another: here the first is `Stop`'s log, the second a buffer that
travels to the driving rank, which prints its own answer and then those that differ. So all that Pdb can do, ranks do
in lockstep, on every version of Python.
"""

from __future__ import annotations

import bdb
import builtins
import contextlib
import ctypes
import io
import pdb
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from vescale_trace.environment import seconds as seconds_of
from vescale_trace.stack import PACKAGES, module_of

from .._communication import events
from .._communication.hangs.words import named_ranks
from .._tensor import tensor
from . import session
from .guard import together
from .session import Stop, Wire

THINKING_SECONDS = 3600.0
"""After so long without a command all go on; VESCALE_BREAKPOINT_SECONDS says otherwise."""
_REFUSED = ("interact", "run", "restart", "debug", "commands")
_SKIPPED = ["torch", "torch.*", *PACKAGES, *(f"{name}.*" for name in PACKAGES)]
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+\b")
_MOST_LINES = 12


class Prompt(pdb.Pdb):
    """The debugger of this rank."""

    def __init__(self, rank: int, size: int, driver: int) -> None:
        streams: dict[str, Any] = {"stdin": _Commands(self._next), "stdout": io.StringIO()}
        if sys.version_info >= (3, 14):
            streams["backend"] = "settrace"
        super().__init__(nosigint=True, readrc=False, skip=_SKIPPED, **streams)
        self.use_rawinput, self.prompt = False, ""
        self._rank, self._size, self._driver = rank, size, driver
        self._wire = Wire() if size > 1 else None
        self._stop: Stop | None = None
        self._name, self._stops = "", 0
        self._goes_on = False
        self._real: tuple[Any, Any] = (sys.stdin, sys.stdout)

    def stop_at(self, frame: FrameType, name: str) -> None:
        """Stands at the line that `frame` executes; `name`: of this stop, the same on all ranks."""
        self._name, self._stops = name, 0
        bdb.Bdb.set_trace(self, frame)  # callers are traced from now on
        sys.settrace(None)  # and this function is not
        # `set_trace` of newer Pythons stops at the next opcode, which is still this line; a command ends that in the
        # frames that were entered.
        with getattr(self, "set_enterframe", contextlib.nullcontext)(frame):
            self.interaction(frame, None)
        if sys.version_info < (3, 13):  # what was assigned; where a trace function is called, its caller sees to it
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        if not self._goes_on or self.breaks:
            sys.settrace(self.trace_dispatch)

    # --- what Pdb calls

    def interaction(self, frame: FrameType, *args: Any) -> None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        self._stop = Stop(self._wire, f"{self._name}/{self._stops}", self._rank, self._size, self._driver)
        self._stops += 1
        self._goes_on = True
        self._real = (sys.stdin, sys.stdout)
        if self._stop.is_over:
            self._tell(f"rank {self._rank} came to {place} when the others had gone on, and does not stop")
            self.set_continue()
            return
        try:
            self._stop.arrive(place, self._tell)
            super().interaction(frame, *args)
        finally:
            self._stop.leave()

    def get_stack(self, frame: FrameType, trace: Any) -> tuple[list, int]:
        stack, _ = super().get_stack(frame, trace)
        stack = [(one, line) for one, line in stack if not _is_ours(one)]
        at = next((i for i, (one, _) in enumerate(stack) if one is frame), len(stack) - 1)
        return stack, at

    def onecmd(self, line: str) -> bool | None:
        if not line.lstrip().startswith("!") and self.parseline(line)[0] in _REFUSED:
            self.error(f"{self.parseline(line)[0]}: not while ranks go in lockstep; type statements one by one")
            return None
        with contextlib.ExitStack() as stack:
            stack.enter_context(together(self._stop))
            stack.enter_context(contextlib.redirect_stdout(self.stdout))
            stack.enter_context(_unheard())
            stack.enter_context(tensor.printing_global())
            return super().onecmd(line)

    def set_continue(self) -> None:
        super().set_continue()
        self._goes_on = True

    def _set_stopinfo(self, *args: Any, **kwargs: Any) -> None:
        self._goes_on = False
        super()._set_stopinfo(*args, **kwargs)

    def do_quit(self, arg: str) -> bool:
        """Ends the program, on all ranks."""
        self._user_requested_quit = True
        self.set_quit()
        return True

    do_q = do_exit = do_quit

    # --- commands and answers

    def _next(self) -> str:
        stop, text = self._stop, self.stdout.getvalue()
        self.stdout.seek(0)
        self.stdout.truncate()
        stop.answer(text)
        if stop.drives:
            self._show(text, stop.answers(self._tell))
            line = self._typed()
            stop.send(line)
            return line
        line = stop.receive()
        if line is None:
            fix = f"vescale.breakpoint(rank={self._rank}) drives from here"
            self._tell(f"rank {stop.driver} did not come to this line, rank {self._rank} goes on ({fix})")
            return "continue\n"
        return line

    def _show(self, own: str, others: dict[int, str]) -> None:
        self._print(own.rstrip("\n"))
        known = _ADDRESS.sub("0x", own)
        different: dict[str, list[int]] = {}
        for rank, text in sorted(others.items()):
            if _ADDRESS.sub("0x", text) != known:
                different.setdefault(text, []).append(rank)
        for text, ranks in different.items():
            lines = text.rstrip("\n").splitlines() or ["(nothing)"]
            more = [f"... {len(lines) - _MOST_LINES} lines more"] if len(lines) > _MOST_LINES else []
            head = f"{named_ranks(ranks)}: "
            self._print("\n".join([head + lines[0], *(" " * len(head) + one for one in lines[1:_MOST_LINES]), *more]))

    def _typed(self) -> str:
        where = f" of {self._size}" if self._size > 1 else ""
        before = sys.stdin, sys.stdout
        sys.stdin, sys.stdout = self._real
        try:
            with _bounded() as seconds, _completing(self.complete):
                return builtins.input(f"(rank {self._rank}{where}) ") + "\n"
        except EOFError:
            return ""
        except _Idle:
            self._print(f"\nvescale: nothing was typed for {seconds:g} s (VESCALE_BREAKPOINT_SECONDS): going on")
            return "continue\n"
        finally:
            sys.stdin, sys.stdout = before

    def _tell(self, text: str) -> None:
        self._print(f"vescale: {text}")

    def _print(self, text: str) -> None:
        if text:
            print(text, file=self._real[1], flush=True)


class _Commands(io.TextIOBase):
    """A stream whose lines come from a function."""

    def __init__(self, next_line: Callable[[], str]) -> None:
        self.readline = lambda *_: next_line()


class _Idle(Exception):
    """Raised if nothing was typed for too long."""


@contextlib.contextmanager
def _bounded() -> Iterator[float]:
    """Raises _Idle in the block after the time that a person may think."""
    seconds = seconds_of("VESCALE_BREAKPOINT_SECONDS", THINKING_SECONDS)
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield seconds
        return

    def idle(*_: Any) -> None:
        raise _Idle

    before = signal.signal(signal.SIGALRM, idle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield seconds
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _completing(complete: Callable) -> Iterator[None]:
    """Completes names with the tab key in a terminal, as in Pdb."""
    try:
        import readline
    except ImportError:
        yield
        return
    before = readline.get_completer()
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before)


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Traces and timelines that are open do not hear what a person asks for."""
    kept = [(one, one[:]) for one in (events.listeners, events.finishers)]
    for one, _ in kept:
        one.clear()
    try:
        yield
    finally:
        for one, before in kept:
            one[:] = before


def _is_ours(frame: FrameType) -> bool:
    return module_of(frame).partition(".")[0] in PACKAGES


class State:
    """This rank's debugger."""

    def __init__(self) -> None:
        self.prompts: dict[int, Prompt] = {}  # by driver
        self.visits: Counter[tuple[str, int]] = Counter()


state = State()


def stop_here(frame: FrameType, driver: int) -> None:
    """Stands at the line that `frame` executes, with all ranks that come to it."""
    rank, size = session.world()
    place = (frame.f_code.co_filename, frame.f_lineno)
    state.visits[place] += 1
    prompt = state.prompts.get(driver)
    if prompt is None or prompt._size != size:
        prompt = state.prompts[driver] = Prompt(rank, size, driver)
    prompt.stop_at(frame, f"{place[0]}:{place[1]}/{driver}/{state.visits[place]}")
