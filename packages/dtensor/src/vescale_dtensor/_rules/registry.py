"""The table of rules: which function is decided by what, and what a rule sees and says.

A rule is a pure function of a `Call`: the function, its static arguments, and an
`Operand` (layout only) in place of every tensor. It answers with

- a `Signature` (`_dispatch/signature.py`): names for the dims; the solver does the rest, or
- a `Decision`, made by hand, or
- `decomposed(function)`: run this Python function on the DTensors themselves, or
- None: no opinion, the fallback takes over.

Decisions are cached per function, input layouts and static arguments, so a rule may
take its time and must not look at anything else: not at values, grad mode or rank.
(Decisions of different ranks may differ in local sizes only.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch

from .._layouts.layout import Layout
from .._layouts.mesh import Mesh
from .._torch_private import OpOverload, OpOverloadPacket
from .traits import NONE, Trait

# What a rule may say about an output: a layout, a tuple of them, or None for "leave it alone".
Out = Any


class Operand:
    """A tensor argument as a rule sees it. A plain tensor is I on every axis and has `plain` set. products: see
    `Layout`."""

    __slots__ = ("layout", "plain", "index", "products")

    def __init__(self, layout: Layout, plain: bool, index: int, products: str | None = None) -> None:
        self.layout, self.plain, self.index, self.products = layout, plain, index, products

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
        from .._communication.events import raw_name

        return raw_name(self.function)


@dataclass(slots=True)
class Decision:
    """Decision for one function with given layouts.

    targets: per operand (in the order of the call), the layout that it must have, or None to leave it unchanged.
    out: the layout to attach to the result.
    run: the local function, or None for the called one; it gets all arguments, converted.
    decomposition: a Python function to run on the DTensors instead, with dispatch on.
    guarded: whether a result is looked at before it is attached: it may be a plain operand, or is a number.
    partial: operands that stay partial unless their sum is memoised.
    alike: operands, and the axes on which they stay I but might as well be R.
    parts: for an operand in `alike`, whether the call takes parts of it that will be used differently.
    zeros: the layout in which the first operand accepts the others unchanged, if it holds only zeros.
    explanation: for `strict()`, why an operand must move, and remedies (code, cost).
    """

    targets: tuple[Layout | None, ...] = ()
    out: Out = None
    run: Callable | None = None
    decomposition: Callable | None = None
    untracked: tuple[int, ...] = ()
    mutated: tuple[int, ...] = ()
    plain: bool = False
    guarded: bool = False
    copies: bool = False
    watched: bool = False
    partial: tuple[int, ...] = ()
    alike: tuple[tuple[int, tuple[int, ...]], ...] = ()
    parts: bool = False
    zeros: Layout | None = None
    explanation: tuple[str, tuple[tuple[str, str], ...]] | None = None
    ready: bool = field(default=False)


def decomposed(function: Callable) -> Decision:
    """Returns a decision to run `function(*args, **kwargs)` on the DTensors, with dispatch on."""
    return Decision(decomposition=function)


class Entry:
    """One function's rule, what the function is, and its decisions so far."""

    __slots__ = ("function", "rule", "handler", "cache", "exact", "traits", "inplace")

    def __init__(
        self, function: Callable, rule: Callable | None = None, handler: Callable | None = None, traits: Trait = NONE
    ) -> None:
        self.function = function
        self.rule = rule
        self.handler = handler
        self.traits = traits
        self.cache: dict[Any, Decision] = {}
        self.exact = False
        self.inplace = is_inplace(function)


class Table(dict[Callable, Entry]):
    """function -> entry. `overlays` are tables that are made from this one, function by function, when asked: they
    are told what is registered anew."""

    __slots__ = ("overlays",)

    def __init__(self) -> None:
        super().__init__()
        self.overlays: WeakSet[Any] = WeakSet()

    def __setitem__(self, function: Callable, entry: Entry) -> None:
        super().__setitem__(function, entry)
        for overlay in self.overlays:
            overlay.forget(function)

    def __missing__(self, function: Callable) -> Entry:
        """The entry of a function that has none: without a rule, but one that waits for it by name."""
        entry = self[function] = Entry(function, rule=_late.get(_name_of(function)))
        return entry


TABLE = Table()
_late: dict[str, Callable[[Call], Any]] = {}
# A cache that outgrows this is dropped whole: static arguments that never repeat would fill the memory.
CACHE_LIMIT = 8192

_INPLACE_DUNDERS = frozenset(
    f"__{name}__"
    for name in "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift setitem".split()
)


def is_inplace(function: Callable) -> bool:
    """True if a function writes to its first argument, by torch's naming."""
    name = getattr(function, "__name__", "")
    return name in _INPLACE_DUNDERS or (name.endswith("_") and not name.endswith("__"))


def rule(*functions: Callable | Iterable[Callable], exact: bool = False, traits: Trait | None = None) -> Callable:
    """Registers the decorated function as the rule of all `functions`.

    exact: the decision depends on the value of float arguments (an order of a norm).
    traits: what the functions are; None leaves what the table says of each, for another rule is no other function.
    """

    def register(decide: Callable[[Call], Any]) -> Callable:
        for function in _flat(functions):
            entry = Entry(function, rule=decide, traits=traits_of(function) if traits is None else traits)
            entry.exact = exact
            TABLE[function] = entry
        return decide

    return register


def late_rule(*names: str) -> Callable:
    """Registers the decorated function as the rule of what is imported later, if at all: an operator of torch.library,
    "namespace::name", or an autograd Function, "module.Name"."""

    def register(decide: Callable[[Call], Any]) -> Callable:
        for name in names:
            _late[name] = decide
        return decide

    return register


def late_rule_of(function: type) -> Callable[[Call], Any] | None:
    """The rule that waits for an autograd Function."""
    return _late.get(f"{function.__module__}.{function.__qualname__}")


def _name_of(function: Callable) -> str:
    """The name of an operator of torch.library, "" of all else."""
    if isinstance(function, OpOverload):
        return function._schema.name
    return function._qualified_op_name if isinstance(function, OpOverloadPacket) else ""


def handler(*functions: Callable | Iterable[Callable], traits: Trait | None = None) -> Callable:
    """Registers `handle(function, args, kwargs)`: takes the call as it is, dispatch on, nothing cached."""

    def register(handle: Callable) -> Callable:
        for function in _flat(functions):
            TABLE[function] = Entry(function, handler=handle, traits=traits_of(function) if traits is None else traits)
        return handle

    return register


def traits_of(function: Callable) -> Trait:
    """Returns the traits of a function, none if the table has none. An overload has the traits of its packet."""
    entry = TABLE.get(function)
    if entry is None and isinstance(function, OpOverload):
        entry = TABLE.get(function.overloadpacket)
    return NONE if entry is None else entry.traits


def declare(*functions: Callable | Iterable[Callable], traits: Trait) -> None:
    """Says what functions are, and leaves their rules."""
    for function in _flat(functions):
        entry = TABLE.get(function) or Entry(function)
        entry.traits = traits
        TABLE[function] = entry


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
