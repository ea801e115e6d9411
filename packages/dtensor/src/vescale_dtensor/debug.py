"""Seeing communication, forbidding it, and stopping in a debugger.

with comm_trace(model) as trace:
    loss = model(batch)
    loss.backward()
print(trace)                      # every collective, by cause

with strict():                    # an implicit collective is an error
    y = model(batch)
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from vescale_trace.stack import caller
from vescale_trace.values import tensors_in

from ._communication import events as _events
from ._communication.advice import Advice as Advice
from ._communication.advice import Report, report
from ._communication.events import Cause as Cause
from ._communication.events import Event as Event
from ._conversions.memo import version
from ._debugger.ide import refuse_evaluated
from ._debugger.prompt import stop_here
from ._debugger.quiet import is_unstopped
from ._debugger.session import world
from ._errors import MeshError
from ._layouts.layout import Layout
from ._tensor.tensor import DTensor, local_only

_values = itertools.count()  # tells the values of conversions apart, of all traces


@dataclass
class Trace:
    """The collectives of a `comm_trace()`, in order."""

    events: list[Event] = field(default_factory=list)
    calls: collections.Counter[str] = field(default_factory=collections.Counter, repr=False)
    reads: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict, repr=False)
    _model: nn.Module | None = field(default=None, repr=False)
    _said: tuple[int | None, dict[str, tuple[str, ...]]] | None = field(default=None, repr=False)

    def count(self, **wanted: object) -> int:
        """Returns how many collectives match: `trace.count(kind="all_gather", direction="forward")`.

        Fields: kind, axes (a tuple, or one axis name), direction, function, module (a prefix).
        """
        return sum(event.count for event in self.select(**wanted))

    def received(self, **wanted: object) -> int:
        """Returns the bytes that this rank received in the collectives that match."""
        return sum(event.received for event in self.select(**wanted))

    def select(self, **wanted: object) -> list[Event]:
        """Returns the events that match; see `count`."""
        return [event for event in self.events if all(_matches(event, k, v) for k, v in wanted.items())]

    @property
    def least(self) -> int | None:
        """Returns the collectives that the plan's sharded weights need for the traced calls; None without a plan."""
        return self._says()[0]

    def advice(self) -> Report:
        """Reports what was sent beyond the needs of the plan's sharded weights: for each line that sends more, the
        cause, and the boundary or the rule that would save it. `print(trace.advice())`.

        It ignores gradient synchronisation, gathers of sharded parameters, and explicit conversions.
        """
        return report(self.events, *self._says())

    def _says(self) -> tuple[int | None, dict[str, tuple[str, ...]]]:
        """Returns the minimum that the model's plan implies, and where it leaves sums open."""
        installed = getattr(self._model, "_vescale", None)
        if installed is None:
            return self._said or (None, {})
        backward = any(event.cause.direction == "backward" for event in self.events)
        return installed.least(self._model, self.calls, self.reads, backward), installed.open_sums(self._model)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_model": None, "_said": self._says()}  # a parallelized model stays in its process

    def __len__(self) -> int:
        return self.count()

    def __str__(self) -> str:
        rows: collections.Counter[tuple] = collections.Counter()
        received: collections.Counter[tuple] = collections.Counter()
        for event in self.events:
            cause = event.cause
            key = (event.kind, ",".join(event.axes), cause.direction, cause.function, cause.module, cause.line)
            rows[key] += event.count
            received[key] += event.received
        table = [("count", "bytes", "collective", "axes", "direction", "function", "module", "line")]
        table += [(str(count), str(received[key]), *key) for key, count in rows.items()]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table)


@contextlib.contextmanager
def comm_trace(model: nn.Module | None = None) -> Iterator[Trace]:
    """Records every collective and its cause while the context is open.

    Arguments: the root module, for module paths in the causes (without it, they are class names). It costs a Python
    call per module and per collective while open, and nothing otherwise.
    """
    trace = Trace(_model=model)
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    parameters = {id(one): name for name, one in model.named_parameters()} if model is not None else {}
    stack: list[str] = []

    def enter(module: nn.Module, args: tuple) -> None:
        stack.append(names.get(id(module), type(module).__name__))
        trace.calls[stack[-1]] += 1
        if args and isinstance(args[0], Tensor):
            trace.reads.setdefault(stack[-1], {})[value_number(args[0])] = cut_last(args[0])

    def leave(module: nn.Module, args: object, output: object) -> None:
        if stack:
            mark(output, stack.pop())

    def moved(tensor: Tensor, source: Layout, target: Layout) -> _events.Moved:
        known = tensor.__dict__
        number = value_number(tensor)
        parameter = parameters.get(id(tensor), "parameter" if isinstance(tensor, nn.Parameter) else "")
        kinds = {axis: state.kind for axis, state in zip(source.mesh.names, source.states)}
        made_in = known.get("_returned_by", "")
        return _events.Moved(parameter, number, made_in, kinds, source.placements, target.placements)

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    saved, _events.module_path = _events.module_path, lambda: stack[-1] if stack else ""
    told_of, _events.told_of = _events.told_of, moved
    _events.listeners.append(trace.events.append)
    try:
        yield trace
    finally:
        _events.listeners.remove(trace.events.append)
        _events.module_path, _events.told_of = saved, told_of
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Turns every implicit conversion that communicates in the forward into an ImplicitCommunicationError, which names
    the fix.

    Explicit conversions (`redistribute`, `full_tensor`, a plan's module boundaries) are allowed. The error names the
    operands of the user's call, and fixes that were tried: `error.fixes` has them as {operand: placements}.
    """
    from ._communication.strict import Strict  # dispatch imports what stands here

    with Strict():
        yield


def breakpoint(rank: int = 0) -> None:
    """Stops all ranks at the caller's line in Python's debugger, driven from `rank`.

    Every rank executes what is typed, in its own frame: commands (`n`, `s`, `u`, `b`, `c`), expressions and statements,
    including ones with collectives. The driving rank's answer is printed, followed by those of ranks that differ.
    DTensors print the global tensor. Ranks that do not reach the line are named. A collective that needs one of them,
    or that not all ranks begin, is refused. The ranks wait outside any collective for up to an hour
    (VESCALE_BREAKPOINT_SECONDS) and then continue.

    Call it on all ranks, at the same line. It does not stop inside `generate_plan` and `dry_run`, which run the code on
    samples.
    """
    if is_unstopped():
        return
    if not 0 <= rank < world()[1]:
        raise MeshError(
            "breakpoint", f"rank {rank} of a world of {world()[1]}", (), [("vescale.breakpoint()", "rank 0 drives")]
        )
    stop_here(caller(), rank)


def hook_breakpoints() -> None:
    """Makes Python's own `breakpoint()` stop all ranks, from now on, in a world of several.

    A hook that somebody else has set, or PYTHONBREAKPOINT, is left alone: an IDE's stops the rank that it is attached
    to, and what it evaluates there may not communicate.
    """
    refuse_evaluated()
    if world()[1] > 1 and sys.breakpointhook is sys.__breakpointhook__ and "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _stop_callers


def value_number(tensor: Tensor) -> int:
    """Tells this tensor, as it is now, from all others."""
    with local_only():
        known, now = tensor.__dict__, version(tensor)
    if "_traced" not in known or known["_traced"][0] != now:
        known["_traced"] = (now, next(_values))
    return known["_traced"][1]


def cut_last(tensor: Tensor) -> tuple[str, ...]:
    """The axes that cut its last dim."""
    if type(tensor) is not DTensor:
        return ()
    layout = tensor._layout.base
    last = len(layout.shape) - 1
    return tuple(axis for axis, one in zip(layout.mesh.names, layout.states) if one.kind == "S" and one.dim == last)


def mark(value: object, module: str) -> None:
    """Notes on DTensors which module returned them, the innermost."""
    for one in tensors_in(value):
        if type(one) is DTensor:
            one.__dict__.setdefault("_returned_by", module)


def _stop_callers(*args: object, **kwargs: object) -> None:
    if not is_unstopped():
        stop_here(sys._getframe(1), 0)


def _matches(event: Event, name: str, value: Any) -> bool:
    if name == "axes":
        return event.axes == ((value,) if isinstance(value, str) else tuple(value))
    if name == "module":
        return event.cause.module.startswith(str(value))
    if name in ("direction", "function"):
        return getattr(event.cause, name) == value
    return getattr(event, name) == value
