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
import pdb
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import _events
from ._events import Cause as Cause
from ._events import Event as Event


@dataclass
class Trace:
    """The collectives of a `comm_trace()`, in order."""

    events: list[Event] = field(default_factory=list)

    def count(self, **wanted: object) -> int:
        """How many collectives match: `trace.count(kind="all_gather", direction="forward")`.

        Fields: kind, axes (a tuple, or one axis name), direction, function, module (a prefix).
        """
        return sum(event.count for event in self.select(**wanted))

    def received(self, **wanted: object) -> int:
        """Bytes that this rank received in the collectives that match."""
        return sum(event.received for event in self.select(**wanted))

    def select(self, **wanted: object) -> list[Event]:
        """The events that match; see `count`."""
        return [event for event in self.events if all(_matches(event, k, v) for k, v in wanted.items())]

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
    """Lists every collective with its cause, while the context is open.

    Arguments: the root module, for module paths in the causes (without it they are
    class names). Costs a Python call per module and per collective while open;
    nothing otherwise.
    """
    trace = Trace()
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    stack: list[str] = []

    def enter(module: nn.Module, args: object) -> None:
        stack.append(names.get(id(module), type(module).__name__))

    def leave(module: nn.Module, args: object, output: object) -> None:
        if stack:
            stack.pop()

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    saved, _events.module_path = _events.module_path, lambda: stack[-1] if stack else ""
    _events.listeners.append(trace.events.append)
    try:
        yield trace
    finally:
        _events.listeners.remove(trace.events.append)
        _events.module_path = saved
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """An implicit conversion that communicates in the forward raises ImplicitCommunicationError, naming the fix.

    Conversions that were asked for (`redistribute`, `full_tensor`, a plan's module
    boundaries) are allowed. The error names the operands of the call that the user made, and fixes that were tried:
    `error.fixes` has them as {operand: placements}.
    """
    from ._strict import Strict  # dispatch imports what stands here

    with Strict():
        yield


def breakpoint(rank: int = 0) -> None:
    """Stops `rank` in pdb at the caller's line; the other ranks wait for it at most `timeout` of their group.

    All ranks must call it. Type `c` to go on.
    """
    distributed = torch.distributed
    if not distributed.is_initialized():
        pdb.Pdb().set_trace(sys._getframe(1))
        return
    if distributed.get_rank() == rank:
        # under torchrun standard input is not the terminal's
        with contextlib.ExitStack() as stack:
            stdin = sys.stdin if sys.stdin is not None and sys.stdin.isatty() else None
            if stdin is None:
                with contextlib.suppress(OSError):
                    stdin = stack.enter_context(open("/dev/stdin"))
            debugger = pdb.Pdb(stdin=stdin, stdout=sys.stdout) if stdin is not None else pdb.Pdb()
            debugger.prompt = f"(rank {rank}) "
            debugger.set_trace(sys._getframe(1))
            distributed.barrier()
    else:
        distributed.barrier()


def _matches(event: Event, name: str, value: Any) -> bool:
    if name == "axes":
        return event.axes == ((value,) if isinstance(value, str) else tuple(value))
    if name == "module":
        return event.cause.module.startswith(str(value))
    if name in ("direction", "function"):
        return getattr(event.cause, name) == value
    return getattr(event, name) == value
