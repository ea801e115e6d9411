"""Keeps breakpoints quiet where user code runs on samples: planning, dry runs.

Within `unstopped` breakpoints of all kinds go on at once, and what the code prints is kept back; one line on stderr
says so. Code of users may also be run by a package that does not know this one: those functions are in `_RUN_ALONE`.
"""

from __future__ import annotations

import contextlib
import io
import pdb
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from .._communication.events import is_users

_RUN_ALONE = {("vescale_pipeline._trace.dry_run", "dry_run")}
"""(module, function) under whose frames nobody stops."""


@contextlib.contextmanager
def unstopped(doing: str) -> Iterator[None]:
    """Breakpoints in the block, `breakpoint()` and `pdb.set_trace()` among them, do not stop, and prints do not print.

    `doing`: what the block does with the user's code, for the line on stderr that says what was left out.
    """
    global _doing
    passed: list[str] = []

    def go_on(*args: Any, **kwargs: Any) -> None:
        _pass_by(passed)

    printed = _Counted()
    hook, trace, method = sys.breakpointhook, pdb.set_trace, pdb.Pdb.set_trace
    saved, _doing = _doing, passed
    sys.breakpointhook = pdb.set_trace = pdb.Pdb.set_trace = go_on
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        sys.breakpointhook, pdb.set_trace, pdb.Pdb.set_trace = hook, trace, method
        _doing = saved
        told = [f"did not stop at {', '.join(dict.fromkeys(passed))}"] if passed else []
        told += [f"kept back {printed.lines} printed line{'s' * (printed.lines != 1)}"] if printed.lines else []
        if told:
            print(f"vescale: {doing} and {' and '.join(told)}", file=sys.stderr)


def is_unstopped() -> bool:
    """True if a breakpoint is to be passed by; notes the line."""
    if _doing is not None:
        _pass_by(_doing)
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _RUN_ALONE:
            return True
        frame = frame.f_back
    return False


def _pass_by(passed: list[str]) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    passed.append(f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "a breakpoint")


class _Counted(io.TextIOBase):
    """Counts lines, and keeps none."""

    lines = 0

    def write(self, text: str) -> int:
        self.lines += text.count("\n")
        return len(text)


_doing: list[str] | None = None  # the places passed by, while a block is open
