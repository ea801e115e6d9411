"""Timeline: the operators and collectives of a training step, and the seconds that they take on a hardware profile.

What is recorded are sizes: the same record is priced on any profile. Each operator costs what its curve, or the
profile's rates, say for the bytes that it touches; products and attention cost by their shapes; a collective by the
bytes it receives over its axis, and by what ranks wait for each other there, after so much computation. What computes
and what communicates takes turns, but for what ZeRO and data parallelism reduce and gather beside the passes: of that
the profile's share is hidden, as far as anything is computed before the next, and ranks wait for each other once, at
the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vescale_dtensor.debug import Event
from vescale_dtensor.engine import current_module
from vescale_trace.meter import flops_of
from vescale_trace.values import tensors_in

if TYPE_CHECKING:  # the planner builds on dry runs
    from .search.pricing.hardware import Hardware

PHASES = {"activations": "forward", "gradients": "backward", "optimizer": "optimizer"}
BESIDE = ("gradient sync", "parameter gather")
"""Causes of collectives that run beside computation."""


@dataclass(frozen=True)
class Operation:
    """Operators alike.

    Arguments:
        name: "aten.gelu"; "attention" and "attention_backward" for fused kernels, with ".causal" if they are.
        moved: bytes of operands and results, 0 where nothing is moved (a view).
        product: (count, m, n, k) of matrix products; of groups of rows, as if they were equally large.
        flops: of attention.
        itemsize: bytes of a number of its operands, for products and attention.
    """

    name: str
    moved: int
    product: tuple[int, int, int, int] | None = None
    flops: int = 0
    itemsize: int = 4

    def seconds(self, hardware: Hardware) -> float:
        """Seconds on a device of `hardware`."""
        if self.product is not None:
            return hardware.computing(self.itemsize).stacked_seconds(*self.product)
        if self.flops:
            return hardware.computing(self.itemsize).attention_seconds(self.name, self.flops)
        return hardware.operator_seconds(self.name, self.moved)


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step by kind; `communication` is what nothing hides, `host` what the host takes on top of the
    device."""

    products: float
    attention: float
    elementwise: float
    host: float
    communication: float
    hidden: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.elementwise + self.host + self.communication


@dataclass(frozen=True)
class Timeline:
    """Work of one rank in one step.

    Arguments:
        operations: (phase, module, operation) -> how often; phases are forward, backward, optimizer, and backward
            and optimizer have no module.
        between: operation -> how often, before each of the collectives and after the last.
        collectives: as in `DryRun`.
        mesh: axis -> ranks, outermost first.
    """

    operations: Mapping[tuple[str, str, Operation], int] = field(repr=False)
    between: tuple[Mapping[Operation, int], ...] = field(repr=False)
    collectives: tuple[Event, ...] = field(repr=False)
    mesh: Mapping[str, int]

    def seconds(self, hardware: Hardware) -> Seconds:
        """Seconds of the step on `hardware`."""
        spent: defaultdict[str, float] = defaultdict(float)
        for (_, _, operation), count in self.operations.items():
            kind = "products" if operation.product is not None else "attention" if operation.flops else "elementwise"
            spent[kind] += count * operation.seconds(hardware)
        crowded = max(1.0, prod(self.mesh.values()) / hardware.at_once) if hardware.at_once else 1.0
        shown = hidden = 0.0
        for event, seconds, beside in self.communication(hardware):
            apart = event is None or event.cause.function not in BESIDE
            free = 0.0 if apart else min(seconds * hardware.hidden, beside)
            shown, hidden = shown + seconds - free, hidden + free
        host = sum(self.operations.values()) * hardware.host  # beside the device, unless it is the device
        spent["host"] = host if hardware.at_once else max(0.0, host - sum(spent.values()))
        computed = {name: spent[name] * crowded for name in ("products", "attention", "elementwise", "host")}
        return Seconds(**computed, communication=shown, hidden=hidden)

    def communication(self, hardware: Hardware) -> Iterator[tuple[Event | None, float, float]]:
        """Each collective, its seconds, what ranks wait for each other before it included, and the seconds that they
        compute from there to the next; None for the end of the step, where they wait once more."""
        host = hardware.host if hardware.at_once else 0.0
        computed = [
            sum(count * (operation.seconds(hardware) + host) for operation, count in operations.items())
            for operations in self.between
        ]
        since, beside = 0.0, [*computed[1:-1], 0.0]  # the last is waited for before the optimizer's step
        for event, received, before, after in zip_longest(self.collectives, self._received(), computed, beside):
            since += before
            seconds = 0.0 if event is None else self._collective_seconds(event, received, hardware)
            if event is None or seconds and event.cause.function not in BESIDE:
                seconds, since = seconds + hardware.wait_seconds(since), 0.0
            yield event, seconds, after or 0.0

    def _received(self) -> list[int]:
        """Bytes of each collective; those that are not counted are the second half of the one before."""
        received = [event.received for event in self.collectives]
        for i in reversed(range(1, len(received))):
            if not self.collectives[i].count:
                received[i - 1], received[i] = received[i - 1] + received[i], 0
        return received

    def _collective_seconds(self, event: Event, received: int, hardware: Hardware) -> float:
        if not event.count:
            return 0.0
        names = list(self.mesh)
        ranks = prod(self.mesh[axis] for axis in event.axes)
        stride = prod(self.mesh[axis] for axis in names[names.index(event.axes[-1]) + 1 :]) if event.axes else 1
        return hardware.collective_seconds(event.kind, ranks, received, stride)


class Recorder:
    """Notes operators, and which of `events` were there by then; a listener of `Meter`."""

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self.operations: Counter[tuple[str, str, Operation]] = Counter()
        self._events, self._between = events, [Counter[Operation]()]

    def note(self, kind: str, function, args: tuple, kwargs: dict, out) -> None:
        operation = operation_of(function, args, kwargs, out)
        if operation is not None:
            phase = PHASES.get(kind, kind)
            self.operations[phase, current_module() if phase == "forward" else "", operation] += 1
            self._up_to_now()[operation] += 1

    def _up_to_now(self) -> Counter[Operation]:
        while len(self._between) <= len(self._events):
            self._between.append(Counter())
        return self._between[-1]

    def timeline(self, mesh: Mapping[str, int]) -> Timeline:
        """Timeline of what was noted."""
        self._up_to_now()
        return Timeline(self.operations, tuple(self._between), tuple(self._events), mesh)


def operation_of(function, args: tuple, kwargs: dict, out) -> Operation | None:
    """Returns the operation to price; None for what computes nothing: collectives, which are noted as such, and
    markers."""
    packet = function.overloadpacket
    if function.namespace != "aten":
        return None
    product = _PRODUCTS.get(packet)
    moved = _bytes((args, kwargs, out))
    name = f"aten.{packet.__name__}"
    if product is not None:
        return Operation(name, moved, product(*args), itemsize=_width(args))
    if "scaled_dot_product" in packet.__name__:
        name = "attention_backward" if "backward" in packet.__name__ else "attention"
        causal = any(one is True for one in args) or kwargs.get("is_causal")
        flops = flops_of(packet, args, kwargs, out)
        return Operation(name + ".causal" * bool(causal), moved, None, flops, args[0].itemsize)
    if function in _MAKES_NOTHING or _is_view(function):
        moved = 0
    return Operation(name, moved)


def _width(args: tuple) -> int:
    """Bytes of a number of the last operand (of a product with a bias it is a matrix), where groups end aside."""
    operands = [one for one in args if isinstance(one, Tensor)]
    return next((one for one in reversed(operands) if one.dtype is not torch.int32), operands[-1]).itemsize


def _is_view(function) -> bool:
    """True if it returns its operand's memory, not written to."""
    result = function._schema.returns
    return bool(result) and result[0].alias_info is not None and not result[0].alias_info.is_write


def _bytes(tree: object) -> int:
    """Bytes of all tensors, each once; of one that is expanded, what lies in memory."""
    return sum(_held(one) for one in {id(one): one for one in tensors_in(tree)}.values())


def _held(tensor: Tensor) -> int:
    numbers = prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride)
    return numbers * tensor.element_size()


def _mm(a: Tensor, b: Tensor, *_: object) -> tuple[int, int, int, int]:
    return 1, a.shape[0], b.shape[1], a.shape[1]


def _bmm(a: Tensor, b: Tensor, *_: object) -> tuple[int, int, int, int]:
    return a.shape[0], a.shape[1], b.shape[2], a.shape[2]


def _grouped(a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: object) -> tuple[int, int, int, int]:
    """[T, k] x [groups, k, n], [groups, m, k] x [k, T], [m, T] x [T, n] -> [groups, m, n], and stacks."""
    if a.ndim == b.ndim == 3:
        return _bmm(a, b)
    grouped = b if b.ndim == 3 else a if a.ndim == 3 else offsets
    groups = 1 if grouped is None else max(1, grouped.shape[0])
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    if a.ndim == b.ndim:
        return groups, m, n, -(-k // groups)
    return (groups, -(-m // groups), n, k) if a.ndim == 2 else (groups, m, -(-n // groups), k)


aten = torch.ops.aten
_PRODUCTS: dict[object, Callable[..., tuple[int, int, int, int]]] = {
    aten.mm: _mm,
    aten.bmm: _bmm,
    aten.addmm: lambda bias, a, b, *_: _mm(a, b),
    aten.baddbmm: lambda bias, a, b, *_: _bmm(a, b),
    aten._grouped_mm: _grouped,
}
_MAKES_NOTHING = {
    aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten._unsafe_view.default,
    aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.resize_.default, aten.lift_fresh.default,
    aten.empty_strided.default, aten.new_empty_strided.default,
}  # fmt: skip
