"""Traces a tensor's layout to functions, lines and conversions, kept while somebody asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vescale_trace.stack import user_line
from vescale_trace.values import tensors_in

from .._communication import events
from .._communication.events import Event
from .._layouts.layout import Layout
from .._tensor import tensor as tensor_module
from .._tensor.tensor import DTensor, local_only

_KEY = "vescale: where it was made"


@dataclass(frozen=True)
class Operand:
    """A function's argument: its name (of a parameter, else its place), its layout, and its origin."""

    name: str
    layout: Layout
    origin: Origin | None


@dataclass(frozen=True)
class Origin:
    """A layout, the call that made it, and what was sent for that. It keeps no tensor alive."""

    layout: Layout
    function: str
    module: str
    line: str
    operands: tuple[Operand, ...]
    sent: tuple[Event, ...] = ()
    is_conversion: bool = False

    def lines(self, depth: int, indent: str = "") -> Iterator[str]:
        where = "".join(f" {word} {text}" for word, text in (("in", self.module), ("at", self.line)) if text)
        yield f"{indent}{self.layout!r}, by {self.function}{where}"
        for reason in self.reasons():
            yield f"{indent}  {reason}"
        for operand in self.operands if depth else ():
            if operand.origin is None:
                yield f"{indent}  {operand.name}: {operand.layout!r}"
            else:
                yield f"{indent}  {operand.name}:"
                yield from operand.origin.lines(depth - 1, indent + "    ")

    def reasons(self) -> Iterator[str]:
        """Says why each axis of the mesh is as it is."""
        for axis, name in enumerate(self.layout.mesh.names):
            given = [one for one in self.operands if one.layout.mesh is self.layout.mesh]
            sent = [event for event in self.sent if name in event.axes]
            cost = "".join(f"; {event.kind}, {event.received:,} bytes received" for event in sent)
            state = self.layout.states[axis]
            if self.is_conversion:
                before = given[0].layout.states[axis]
                change = f"{before!r} -> {state!r}, which {self.function} asks for"
                reason = f"{state!r} as before" if before is state else change
            else:
                reason = self._reason(state.kind, [(one.name, one.layout.states[axis].kind) for one in given])
            yield f"{name}: {reason}{cost}"

    def _reason(self, kind: str, kinds: list[tuple[str, str]]) -> str:
        alike = [name for name, other in kinds if other == kind]
        sharded = [name for name, other in kinds if other == "S"]
        partial = [name for name, other in kinds if other == "P"]
        if kind == "P":
            if alike:
                return f"partial, as {' and '.join(alike)}"
            return f"partial: {self.function} sums over what is sharded there in {' and '.join(sharded) or 'its input'}"
        if kind == "S":
            return f"sharded, as {' and '.join(alike)}" if alike else f"sharded by {self.function}"
        if partial or sharded:
            return (
                f"full: {self.function} is given {' and '.join(partial + sharded)} in parts, and needs or makes it full"
            )
        return "full, as what it was made of" if kinds else "full"


class Explanation:
    """Result of `explain`; `str()` is the answer, `origin` the record, None if nothing is known."""

    def __init__(self, layout: Layout | None, origin: Origin | None, name: str, depth: int) -> None:
        self.layout, self.origin, self._name, self._depth = layout, origin, name, depth

    def __str__(self) -> str:
        if self.layout is None:
            return "a plain tensor: all of it is here, as on one device"
        if self.origin is not None:
            return "\n".join(self.origin.lines(self._depth))
        if self._name:
            return f"{self.layout!r}, {self._name}: as the plan, or `distribute_tensor`, laid it out"
        return (
            f"{self.layout!r}; where it came from was not recorded\n"
            "fix: with vescale.explaining(model): ...  # around what makes the tensor"
        )

    __repr__ = __str__


class _Recorder(TorchFunctionMode):
    """Notes on every DTensor, and on its node in autograd's graph, what made it."""

    def __init__(self, names: dict[int, str], sent: list[Event]) -> None:
        super().__init__()
        self._names, self._sent = names, sent
        self.around: Callable | None = None

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not tensor_module.is_global():
            return function(*args, **kwargs)
        given = [one for one in tensors_in((args, kwargs)) if type(one) is DTensor]
        operands = tuple(self._operand(at, one) for at, one in enumerate(given))
        before = len(self._sent)
        out = function(*args, **kwargs)
        for one in tensors_in(out):
            if type(one) is DTensor and (not any(one is other for other in given) or _writes(function)):
                name = events.function_name(function)
                sent = tuple(self._sent[before:])
                origin = Origin(one._layout.base, name, events.current_module(), user_line(), operands, sent)
                _note(one, origin)
        return out

    def _operand(self, at: int, tensor: DTensor) -> Operand:
        origin = origin_of(tensor)
        name = self._names.get(id(tensor)) or _named(origin, f"operand {at}")
        return Operand(name, tensor._layout.base, origin)

    def convert(self, make: Any, tensor: Tensor, source: Layout, target: Layout, *more: Any) -> Tensor:
        """Replaces a conversion: notes what it sent. One that is remembered keeps the record of the first."""
        before = len(self._sent)
        given = (tensor, source, target, *more)
        out = make(*given) if self.around is None else self.around(make, *given)
        if type(out) is DTensor and out is not tensor and _recorded(out) is None:
            said = events.cause()
            origin = origin_of(tensor) if type(tensor) is DTensor else None
            name = self._names.get(id(tensor)) or _named(origin, "what was converted")
            operand = Operand(name, source, origin)
            sent = tuple(self._sent[before:])
            _note(out, Origin(target, said.function, said.module, said.line, (operand,), sent, is_conversion=True))
        return out


def _writes(function: Any) -> bool:
    name = events.raw_name(function)
    return name.endswith("_") and not name.endswith("__") or name in ("__setitem__", "__iadd__", "__imul__")


def _note(tensor: DTensor, origin: Origin) -> None:
    tensor._made_by = origin
    with local_only():
        node = tensor.grad_fn
    if node is not None:
        node.metadata[_KEY] = origin


def _named(origin: Origin | None, otherwise: str) -> str:
    return otherwise if origin is None else f"what {origin.function} gave"


def _recorded(tensor: DTensor) -> Origin | None:
    """The record on the tensor itself, where it is of the layout that the tensor has."""
    found = tensor.__dict__.get("_made_by")
    return found if found is not None and found.layout is tensor._layout.base else None


def origin_of(tensor: DTensor) -> Origin | None:
    """Returns the record of a tensor. One that a conversion at a module's boundary made is known by autograd's
    graph."""
    found = _recorded(tensor)
    if found is not None:
        return found
    with local_only():
        node = tensor.grad_fn
    return None if node is None else _of_node(node, tensor._layout.base)


def _of_node(node: Any, layout: Layout) -> Origin | None:
    while node is not None:
        found = node.metadata.get(_KEY)
        if found is not None and found.layout is layout:
            return found
        following = node.next_functions[0][0] if node.next_functions else None
        way = getattr(node, "way", None)
        if way is not None and way[0] is not None and way[0].target is layout:
            route, cause = way
            said = cause if isinstance(cause, events.Cause) else events.Cause(events.function_name(cause))
            before = _of_node(following, route.source) if following is not None else None
            name = "what was converted" if before is None else f"what {before.function} gave"
            operand = Operand(name, route.source, before)
            return Origin(layout, said.function, said.module, said.line, (operand,), is_conversion=True)
        if type(node).__name__ not in ("AliasBackward", "AliasBackward0", "AgainBackward"):
            return None
        node = following
    return None


@contextlib.contextmanager
def explaining(model: nn.Module | None = None) -> Iterator[None]:
    """While the context is open, records every function that returns a DTensor, for `explain`.

    Arguments: the model, for the paths of modules and the names of parameters. It costs some Python per function while
    open, and nothing otherwise. Records hold no tensors.
    """
    from ..debug import comm_trace

    names = {} if model is None else {id(one): name for name, one in model.named_parameters()}
    with comm_trace(model) as trace, _Recorder(names, trace.events) as recorder:
        recorder.around = events.set_watch(recorder.convert)
        try:
            yield
        finally:
            events.set_watch(recorder.around)


def explain(tensor: Tensor, depth: int = 3) -> Explanation:
    """Explains where a tensor's layout came from: why it is replicated, sharded or partial on each axis, which function
    on which line made it so, what was sent for it, and the same for its inputs. No communication.

    Arguments:
        tensor: a tensor made within `explaining(model)`, or a parameter.
        depth: how many calls to go back.

    Example:
        >>> with vescale.explaining(model):
        ...     loss = model(batch)
        >>> print(vescale.explain(loss))
    """
    if type(tensor) is not DTensor:
        return Explanation(None, None, "", depth)
    owner = tensor.__dict__.get("_owner")
    name = getattr(owner, "name", "") if owner is not None else ""
    if name or tensor.__dict__.get("_is_param"):
        name = f"the parameter {name}" if name else "a parameter"
    return Explanation(tensor._layout.base, origin_of(tensor), name, depth)
