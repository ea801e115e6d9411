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
from typing import Any

from vescale_trace.stack import frames, module_of, user_line

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
    return any((module_of(frame), frame.f_code.co_name) in _RUN_ALONE for frame in frames())


def _pass_by(passed: list[str]) -> None:
    passed.append(user_line() or "a breakpoint")


class _Counted(io.TextIOBase):
    """Counts lines, and keeps none."""

    lines = 0

    def write(self, text: str) -> int:
        self.lines += text.count("\n")
        return len(text)


_doing: list[str] | None = None  # the places passed by, while a block is open
