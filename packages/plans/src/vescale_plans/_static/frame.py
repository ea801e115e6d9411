"""One recorded call of a module: what entered, what it did, what left, and what was found about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import Difference, Route, Tape, grad_state

from .._apply.containers import map_tensors
from .guard import Guard
from .reads import Reads
from .values import Value

_VALUES = (int, float, bool, str, bytes, complex, type(None), enum.Enum, torch.dtype, torch.device, torch.Size, slice)


@dataclass(frozen=True)
class Step:
    """A conversion at a module's boundary: of the input or output tensor number `at`, or of a parameter (its name)."""

    at: int | str
    route: Route
    cause: object

    @property
    def goes_before(self) -> bool:
        """Whether it may as well be made before all else: of a parameter, and no rank sends anything for it."""
        return isinstance(self.at, str) and self.route.is_local


@dataclass
class Boundary:
    """What is converted when plain tensors enter a module, and when its result leaves it, in order."""

    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    @property
    def is_compilable(self) -> bool:
        """Whether a graph of what is inside holds all of it, on every rank: what moves nothing, or goes before."""
        return all(step.goes_before or step.route.is_nothing for step in (*self.before, *self.after))

    def inside(self) -> Boundary:
        """The boundary of a module inside a region, where tensors have no layout: without what moves nothing."""
        before, after = (tuple(s for s in steps if not s.route.moves_nothing) for steps in (self.before, self.after))
        return Boundary(before, after)


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
    boundary: Boundary = field(default_factory=Boundary)
    conversions: dict[int | str, Tensor] = field(default_factory=dict)  # what it made of inputs and parameters
    sources: dict[int, Tensor] = field(default_factory=dict)  # what the boundary converts into the output
    moved: frozenset[Route] = frozenset()  # conversions that the boundary makes of a parameter, not of what it became
    crossed: dict[Any, Step] = field(default_factory=dict)  # boundaries of a plan between it and what it calls
    reason: Difference | None = None
    reads: Reads | None = None  # of its own code; None where that cannot be looked through
    returns: Value | None = None  # what is known of its result
    first: int | str | None = None
    draws: bool = False  # random numbers, and nothing else is wrong with it: a leaf may draw by region
    reach: Any = None  # of its outputs, where a compiler is to take it (`compiling/passage.py`)
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
    """The layout that a tensor crosses a boundary with; None for a plain one."""
    return tensor._layout if type(tensor) is DTensor else None


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in what a module takes or returns, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def filled(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with its tensors, in order, replaced."""
    queue = iter(tensors)
    return map_tensors(value, lambda _: next(queue))


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
