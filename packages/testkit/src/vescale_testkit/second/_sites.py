"""Names who asked, as host waits, errors and snapshots do: functions and their files, without line numbers."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from types import FrameType


def asker(frame: FrameType | None) -> str:
    """The innermost function that is neither this kit's nor torch's, and the next one out of another file."""
    found: list[tuple[str, str]] = []
    while frame is not None and len(found) < 2:
        place = _place(frame.f_code.co_filename)
        if place and (not found or found[-1][0] != place):
            found.append((place, frame.f_code.co_name))
        frame = frame.f_back
    # A kernel of a backward that is all C++ has no caller in Python on autograd's thread.
    return " < ".join(f"{file}:{function}" for file, function in found) or "autograd"


_PASSES_CALLS_ON = frozenset({"constructors.py", "worker.py", "contextlib.py", "threading.py", "chain.py"})


@lru_cache(maxsize=4096)
def _place(filename: str) -> str:
    """A file as sites name it: by its package; empty for what only passes calls on."""
    path = Path(filename)
    parts = path.parts
    for package in ("torch", "vescale_testkit"):
        if package in parts[:-1]:
            return ""
    if path.name.startswith("<") or path.name in _PASSES_CALLS_ON:
        return ""
    for i, part in enumerate(parts[:-1]):
        if part.startswith("vescale") and parts[i - 1] in ("src", "site-packages"):
            return "/".join([part.removeprefix("vescale_"), *parts[i + 1 :]])
    return path.name
