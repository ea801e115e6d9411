"""The table of rules: which function is decided by what, and what a rule sees and says.

A rule is a pure function of a `Call`: the function, its static arguments, and an
`Operand` (layout only) in place of every tensor. It answers with

- a `Signature` (`_signature.py`): names for the dims; the solver does the rest, or
- a `Decision`, made by hand, or
- `composite(function)`: run this Python function on the DTensors themselves, or
- None: no opinion, the fallback takes over.

Decisions are cached per function, input layouts and static arguments, so a rule may
take its time and must not look at anything else: not at values, grad mode or rank.
(Decisions of different ranks may differ in local sizes only.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .._layout import Layout
from .._mesh import Mesh

# What a rule may say about an output: a layout, a tuple of them, or None for "leave it alone".
Stamp = Any


class Operand:
    """A tensor argument as a rule sees it. A plain tensor is I on every axis and `plain`."""

    __slots__ = ("layout", "plain", "index")

    def __init__(self, layout: Layout, plain: bool, index: int) -> None:
        self.layout, self.plain, self.index = layout, plain, index

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return self.layout.ndim

    @property
    def states(self):
        return self.layout.states

    def __repr__(self) -> str:
        return f"{'plain ' if self.plain else ''}{self.layout!r}"


@dataclass
class Call:
    """One call with its tensors replaced by operands, nested containers included."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    operands: list[Operand]
    mesh: Mesh
    inplace: bool = False

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at `position` or called `name`."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def rest(self, position: int, name: str) -> Any:
        """Sizes or dims given as one sequence or as several arguments: `x.view(2, 3)`, `x.view((2, 3))`."""
        if position < len(self.args):
            first = self.args[position]
            if isinstance(first, (tuple, list)):
                return tuple(first)
            return tuple(self.args[position:])
        value = self.kwargs.get(name)
        return tuple(value) if isinstance(value, (tuple, list)) else value

    @property
    def name(self) -> str:
        from .._events import raw_name

        return raw_name(self.function)


@dataclass(slots=True)
class Decision:
    """What to do for one function on given layouts.

    targets: per operand (in the order of the call), the layout it must have, or
    None for "as it is". out: what to stamp. run: the local function, or None for
    the called one; it gets all arguments, converted. composite: a Python function
    to run on the DTensors instead, with dispatch on. explanation: for `strict()`, why
    an operand must move, and remedies (code, cost).
    """

    targets: tuple[Layout | None, ...] = ()
    out: Stamp = None
    run: Callable | None = None
    composite: Callable | None = None
    untracked: tuple[int, ...] = ()
    mutated: tuple[int, ...] = ()
    plain: bool = False
    copies: bool = False
    explanation: tuple[str, tuple[tuple[str, str], ...]] | None = None
    ready: bool = field(default=False)


def composite(function: Callable) -> Decision:
    """A decision to run `function(*args, **kwargs)` on the DTensors, dispatch on."""
    return Decision(composite=function)


class Entry:
    """One function's rule and its decisions so far."""

    __slots__ = ("function", "rule", "handler", "cache", "exact", "view", "inplace", "solved")

    def __init__(self, function: Callable, rule: Callable | None = None, handler: Callable | None = None) -> None:
        self.function = function
        self.rule = rule
        self.handler = handler
        self.cache: dict[Any, Decision] = {}
        self.exact = False
        self.view = False
        self.inplace = is_inplace(function)
        self.solved = 0


TABLE: dict[Callable, Entry] = {}
# A cache that outgrows this is dropped whole: static arguments that never repeat would fill the memory.
CACHE_LIMIT = 8192

_INPLACE_DUNDERS = frozenset(
    f"__{name}__"
    for name in "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift setitem".split()
)


def is_inplace(function: Callable) -> bool:
    """Whether a function writes to its first argument, by torch's naming."""
    name = getattr(function, "__name__", "")
    return name in _INPLACE_DUNDERS or (name.endswith("_") and not name.endswith("__"))


def rule(*functions: Callable | Iterable[Callable], exact: bool = False, view: bool = False) -> Callable:
    """Registers the decorated function as the rule of all `functions`.

    exact: the decision depends on the value of float arguments (an order of a norm).
    view: the result aliases its input on one device, so that a copy must be guarded.
    """

    def register(decide: Callable[[Call], Any]) -> Callable:
        for function in _flat(functions):
            entry = TABLE[function] = Entry(function, rule=decide)
            entry.exact, entry.view = exact, view
        return decide

    return register


def handler(*functions: Callable | Iterable[Callable]) -> Callable:
    """Registers `handle(function, args, kwargs)`: takes the call as it is, dispatch on, nothing cached."""

    def register(handle: Callable) -> Callable:
        for function in _flat(functions):
            TABLE[function] = Entry(function, handler=handle)
        return handle

    return register


def both(*names: str) -> list[Callable]:
    """`torch.name`, `Tensor.name` and their in-place forms, those that exist."""
    found = []
    for name in names:
        for owner in (torch, torch.Tensor):
            for form in (name, name + "_"):
                function = getattr(owner, form, None)
                if callable(function):
                    found.append(function)
    return found


def _flat(functions: Iterable) -> Iterable[Callable]:
    for function in functions:
        if isinstance(function, (list, tuple, set, frozenset)):
            yield from _flat(function)
        elif function is not None:
            yield function
