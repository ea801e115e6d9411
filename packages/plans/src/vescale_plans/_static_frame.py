"""One recorded call of a module: what entered, what it did, what left, and what was found about it."""

from __future__ import annotations

import contextlib
import enum
import inspect
import random
import sys
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import Difference, Route, Tape, grad_state, local_only

from ._containers import map_tensors
from ._static_guard import Guard

_VALUES = (int, float, bool, str, bytes, complex, type(None), enum.Enum, torch.dtype, torch.device, torch.Size, slice)
RANDOM = "random"  # stands for the state of Python's generator among a module's attributes
_DEPTH, _MANY = 4, 256


@dataclass(frozen=True)
class Step:
    """A conversion at a module's border: of the input or output tensor number `at`, or of a parameter (its name)."""

    at: int | str
    route: Route
    cause: object


@dataclass
class Border:
    """What is converted when plain tensors enter a module, and when its result leaves it, in order."""

    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.before or self.after)


@dataclass
class Frame:
    """One call of a module while a pass is recorded."""

    site: Any
    args: tuple
    kwargs: dict
    key: tuple | None
    guard: Guard
    state: tuple[bool, bool] = field(default_factory=grad_state)
    tape: Tape = field(default_factory=list)
    children: list[Frame] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    layouts: list[Layout | None] = field(default_factory=list)
    out: Any = None
    outputs: list[Layout | None] = field(default_factory=list)
    border: Border = field(default_factory=Border)
    conversions: dict[int | str, Tensor] = field(default_factory=dict)  # what the border made of inputs and parameters
    sources: dict[int, Tensor] = field(default_factory=dict)  # what the border converts into the output
    moved: frozenset[Route] = frozenset()  # conversions that the border makes of a parameter, not of what it became
    crossed: dict[Any, Step] = field(default_factory=dict)  # borders of a plan between it and what it calls
    reason: Difference | None = None
    first: int | str | None = None
    draws: bool = False  # random numbers, and nothing else is wrong with it: a leaf may draw by region
    shares: bool = False  # it, or what it calls, met a conversion again that was remembered

    def __post_init__(self) -> None:
        self.inputs = tensors_of((self.args, self.kwargs))
        self.layouts = [layout_at(tensor) for tensor in self.inputs]

        self.first = _first_tensor(self.args, self.kwargs)

    @property
    def module(self) -> nn.Module:
        return self.site.module

    def forget(self) -> None:
        """Lets go of all tensors: the verdict is there."""
        self.args, self.kwargs, self.out, self.inputs, self.tape = (), {}, None, [], []
        self.conversions, self.sources = {}, {}


def _first_tensor(args: tuple, kwargs: dict) -> int | str | None:
    """Which argument `map_first` would find, where it is a tensor itself."""
    for at, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Tensor):
            return at
        if tensors_of(value):
            return None
    return None


def layout_at(tensor: Tensor) -> Layout | None:
    """The layout that a tensor crosses a border with; None for a plain one."""
    return tensor._layout if type(tensor) is DTensor else None


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in what a module takes or returns, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def odd_value(value: Any) -> str:
    """The type of something that a guard cannot compare, or ''."""
    if isinstance(value, (Tensor, *_VALUES)):
        return ""
    if isinstance(value, dict):
        return next(filter(None, map(odd_value, value.values())), "")
    if isinstance(value, (tuple, list)):
        return next(filter(None, map(odd_value, value)), "")
    return type(value).__name__


def parameter_place(module: nn.Module, name: str) -> tuple[dict, str]:
    """The dict that holds a parameter of that dotted name, and its key there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path)._parameters, leaf


# --- what a module keeps -------------------------------------------------------------


def kept_by(module: nn.Module, given: Any) -> dict[str, Any]:
    """A fingerprint of what a forward may not change: every attribute of the module and those below, the random states
    of Python and numpy, variables around its code and of its class, and containers that it was given."""
    found: dict[str, Any] = {RANDOM: _random_states(), "what it was given": _identities(given)}
    for path, one in module.named_modules():
        for name, value in one.__dict__.items():
            if name != "forward":
                found[f"{path}.{name}" if path else name] = _fingerprint(value, 0)
    for name, value in _variables(module):
        if isinstance(value, _CONTAINERS + _NUMBERS):
            found[name] = _fingerprint(value, 0)
    return found


_CONTAINERS = (list, dict, set)
_NUMBERS = (int, float, str, bool, type(None))


def _random_states() -> tuple:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (hash(random.getstate()),)
    _, keys, *rest = numpy.random.get_state()
    return hash(random.getstate()), hash(keys.tobytes()), *rest


def _variables(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the forward's code reads from around it, and what its classes hold."""
    function = inspect.unwrap(getattr(type(module).forward, "__func__", type(module).forward))
    waiting = [function.__code__] if isinstance(function, FunctionType) else []
    while waiting:
        code = waiting.pop()
        for name in code.co_names:
            if name in function.__globals__:
                yield f"the global {name}", function.__globals__[name]
        for name, cell in zip(code.co_freevars, function.__closure__ or ()) if code is function.__code__ else ():
            with contextlib.suppress(ValueError):  # nothing in it yet
                yield f"the variable {name} around it", cell.cell_contents
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, value in vars(kind).items():
                yield f"{kind.__name__}.{name}", value


def _identities(value: Any) -> Any:
    """Which objects stand where in containers."""
    if isinstance(value, dict):
        return id(value), tuple([(name, _identities(item)) for name, item in value.items()])
    if isinstance(value, (list, tuple)):
        return id(value) if isinstance(value, list) else None, tuple(map(_identities, value))
    return id(value)


def _fingerprint(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        with local_only():
            return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, _NUMBERS):
        return value
    if depth < _DEPTH and isinstance(value, (list, tuple, set, frozenset)) and len(value) <= _MANY:
        return id(value), tuple([_fingerprint(item, depth + 1) for item in value])
    if depth < _DEPTH and isinstance(value, dict) and len(value) <= _MANY:
        return id(value), tuple([(key, _fingerprint(item, depth + 1)) for key, item in value.items()])
    return id(value), len(value) if isinstance(value, Sized) else 0


def changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The first thing that is not as it was, or ''."""
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            return name
    return ""
