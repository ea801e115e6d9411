"""Stack of the running program: who calls, and from which line of the user's. Frames of Python are read here alone, but
where a single one is looked at on a hot path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

PACKAGES = (
    "vescale_trace", "vescale_dtensor", "vescale_rng", "vescale_plans", "vescale_pipeline", "vescale_checkpoint",
    "vescale", "vescale_testkit",
)  # fmt: skip
_TORCH = str(Path(torch.__file__).parent)


def frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yields the frames that run, from the caller's outwards, or from `frame`."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def caller() -> FrameType:
    """Returns the frame that called a public function, the caller of this one: past the check of its arguments."""
    return next(frame for frame in frames(sys._getframe(2)) if module_of(frame) != f"{__package__}.arguments")


def module_of(frame: FrameType) -> str:
    """Returns the name of the module whose code a frame runs."""
    return frame.f_globals.get("__name__") or ""


def is_users(frame: FrameType) -> bool:
    """True if a frame runs code that is neither torch's nor ours."""
    path = frame.f_code.co_filename
    if path.startswith((_TORCH, "<")):
        return False
    return module_of(frame).partition(".")[0] not in PACKAGES


def users_level() -> int:
    """Returns the `stacklevel` by which a warning of the caller shows the user's line, however deep it lies."""
    return next((level for level, frame in enumerate(frames(sys._getframe(1)), 1) if is_users(frame)), 1)


def user_line(frame: FrameType | None = None) -> str:
    """`file.py:12` of the innermost frame outside torch and these packages, from `frame` outwards, or the caller."""
    frame = frame or sys._getframe(1)
    while frame is not None:  # every collective asks
        if is_users(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
