"""Names who communicated, and why: the hook that `comm_trace` and `strict` hang on.

Free when nobody listens: a collective tests one list for emptiness. The cause is a
pair of module globals that dispatch sets before it converts, so that a failing
collective can say who asked for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vescale_trace.stack import user_line


@dataclass(frozen=True, slots=True)
class Moved:
    """Subject of a conversion: a parameter's name or "", a number that tells values apart, the innermost module that
    returned it or "", each axis's kind of state (S, P, I, R), and the placements. It can travel to other processes."""

    parameter: str
    value: int
    made_in: str
    kinds: Mapping[str, str]
    source: tuple[Any, ...]
    target: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a conversion: a function, in which module, at which line of the user's code."""

    function: str
    module: str = ""
    line: str = ""
    direction: str = "forward"
    moved: Moved | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        line = f" at {self.line}" if self.line else ""
        return f"{self.function}{where}{line} ({self.direction})"


@dataclass(frozen=True, slots=True)
class Event:
    """One collective: its kind, the axes, the bytes that this rank received, and the cause.

    `count` is 0 for the second half of a reduction for which a backend needs two calls: it belongs to the same
    collective, but has its own bytes.
    """

    kind: str
    axes: tuple[str, ...]
    received: int
    cause: Cause
    count: int = 1


listeners: list[Callable[[Event], None]] = []
finishers: list[Callable[[Event], None]] = []  # told, after the listeners, when the collective is done
module_path: Callable[[], str] = lambda: ""  # set by debug while somebody traces
told_of: Callable[..., Moved | None] = lambda *operand: None  # (tensor, source, target); set by debug, too
strict_depth = 0
# Called in place of a conversion, with what would make it: set while conversions are recorded.
watch: Callable | None = None
copying = False  # while a shard is copied only so that writes to it stay apart, as one device's copy would
_current: Cause | Callable | str = "a conversion"
_direction = "forward"


def set_cause(function: object, *operand: Any) -> None:
    """Notes what the next conversions are for, and of what: a tensor, its layout and the one that it is to have. Looks
    for the source line only while somebody listens."""
    global _current, _direction
    _direction = "forward"
    _current = function
    if listeners and not isinstance(function, Cause):
        moved = told_of(*operand) if operand else None
        _current = Cause(function_name(function), module_path(), user_line(), moved=moved)


def current_cause() -> object:
    """The cause in its cheap form, for a Function to keep until its backward."""
    return _current


def restore_cause(saved: object) -> None:
    """Sets, in a backward, the cause of the forward conversion."""
    global _current, _direction
    _current, _direction = saved, "backward"


def saved_cause() -> tuple[object, str]:
    """The cause in its cheap form, and its direction, for a graph to keep."""
    return _current, _direction


def take_up_cause(saved: object, direction: str) -> None:
    """Sets the cause under which a collective was captured, when its graph runs."""
    global _current, _direction
    _current, _direction = saved, direction


def cause() -> Cause:
    """The cause in full."""
    known = _current if isinstance(_current, Cause) else Cause(function_name(_current))
    return known if _direction == "forward" else replace(known, direction=_direction)


def announce(kind: str, axes: tuple[str, ...], received: int, count: int = 1) -> Event:
    event = Event(kind, axes, received, cause(), count)
    for listener in listeners:
        listener(event)
    return event


def finish(event: Event) -> None:
    """Says that an announced collective is done."""
    for finisher in finishers:
        finisher(event)


@contextlib.contextmanager
def watched(begins: Callable[[Event], None], ends: Callable[[Event], None]) -> Iterator[None]:
    """Calls `begins` and `ends` around every collective of this rank, with the same event object each time.

    A collective that overlaps with computation ends when something waits for it. On an accelerator, a collective is
    only enqueued; the times are those of the host.
    """
    listeners.append(begins)
    finishers.append(ends)
    try:
        yield
    finally:
        listeners.remove(begins)
        finishers.remove(ends)


def current_module() -> str:
    """Path of the module whose forward runs; "" unless somebody traces."""
    return module_path()


def function_name(function: object) -> str:
    """`matmul`, `view`, `shape`: how a person would write the function. `a @ b` is a `matmul`."""
    name = raw_name(function)
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def raw_name(function: object) -> str:
    """`__matmul__`, `view`, `shape`: the function's own name."""
    if isinstance(function, str):
        return function
    name = getattr(function, "__name__", None) or repr(function)
    if name in ("__get__", "__set__"):  # a property's accessor: the descriptor knows the name
        return getattr(function.__self__, "__name__", name)
    return name


def is_strict() -> bool:
    """True if a `strict()` is open."""
    return strict_depth > 0


def set_watch(function: Callable | None) -> Callable | None:
    """Sets `watch`; returns what it was."""
    global watch
    before, watch = watch, function
    return before
