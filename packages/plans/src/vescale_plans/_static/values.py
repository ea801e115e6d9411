"""What is known about a value while a forward is looked through: it is held by somebody, or made in this call.

Held      the very object, which lives longer than the call; what is read from it is guarded
Made      computed in this call from tensors and guarded values alone: a tensor, a number, a string, or standard
          containers of such. Nothing of it can be reached from outside. `kind` says how much is known
Items     a container made in this call, whose parts are known
Code      a function that was defined in this call
Bound     a function with its first arguments
OneOf     one of several, it is not known which
Dark      a value that must not be used: nothing is known
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor

SCALARS = frozenset({
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
})  # fmt: skip
TENSORS = frozenset({Tensor, nn.Parameter, nn.Buffer, DTensor})
_FEW = 32


class Value:
    """One of the kinds above."""


class Iterator:
    """The type of items that are gone over once."""


@dataclass(frozen=True, eq=False)
class Held(Value):
    it: Any


@dataclass(frozen=True, eq=False)
class Made(Value):
    kind: str


TENSOR, SOMETHING, ANY = Made("a tensor"), Made("something"), Made("something or None")


@dataclass(eq=False)
class Items(Value):
    """A tuple, list, dict or set made here. `parts` of a dict are by key, which is an immutable value.

    given: the caller's, which must not be written to. where: in which branches it was made; a write from within
    another makes its parts unknown: `every` then stands for each of them.
    """

    type: type
    parts: list[Value] | dict[Any, Value]
    where: tuple[int, ...] = ()
    given: bool = False
    every: Value | None = None

    @property
    def values(self) -> list[Value]:
        if self.every is not None:
            return [self.every]
        return list(self.parts.values()) if isinstance(self.parts, dict) else list(self.parts)

    def blur(self, *more: Value) -> None:
        """From now on only what may be in it is known."""
        self.every = joined([*self.values, *more]) if self.values or more else ANY
        self.parts = {} if isinstance(self.parts, dict) else []


@dataclass(eq=False)
class Code(Value):
    """`scope` is the one that it was defined in; `defaults` are values by parameter name."""

    tree: Any
    scope: Any
    defaults: dict[str, Value]
    file: str


@dataclass(frozen=True, eq=False)
class Bound(Value):
    function: Value | str  # the name of a method, of what was made or of a standard container
    args: Sequence[Value]
    kwargs: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Super(Value):
    after: type
    of: Held


@dataclass(frozen=True, eq=False)
class OneOf(Value):
    values: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Spread(Value):
    """Arguments whose number is not known, each of them `part`."""

    part: Value


@dataclass(frozen=True, eq=False)
class Dark(Value):
    why: str


def isa(it: Any, kinds: type | tuple[type, ...]) -> bool:
    """`isinstance`, without asking the object, whose answer may be somebody's code."""
    return issubclass(type(it), kinds)


def is_scalar(it: Any) -> bool:
    """Whether an object is a value, and nothing else: immutable, compared as such."""
    kind = type(it)
    if kind in SCALARS:
        return True
    if kind is tuple or kind is frozenset:
        return all(map(is_scalar, it))
    if kind is slice or kind is range:
        return is_scalar(it.start) and is_scalar(it.stop) and is_scalar(it.step)
    return isa(it, enum.Enum) and is_scalar(it._value_)


def is_tensor(it: Any) -> bool:
    return type(it) in TENSORS


def is_plain(value: Value, given: bool = False) -> bool:
    """Whether a value is made of tensors, scalars and containers made here, and of nothing that lives elsewhere.

    given: what the caller has given counts as well; it may be read, but must not be written to.
    """
    if isinstance(value, Made):
        return True
    if isinstance(value, Held):
        return is_scalar(value.it) or is_tensor(value.it) or _is_tuple_of_plain(value.it)
    if isinstance(value, Items):
        return (given or not value.given) and all(is_plain(part, given) for part in value.values)
    if isinstance(value, Spread):
        return is_plain(value.part, given)
    return isinstance(value, OneOf) and all(is_plain(one, given) for one in value.values)


def _is_tuple_of_plain(it: Any) -> bool:
    return type(it) is tuple and all(is_plain(Held(item)) for item in it)


def constant(value: Value) -> bool:
    """Whether a value is a scalar that is known."""
    return isinstance(value, Held) and is_scalar(value.it)


def alike(a: Value, b: Value) -> bool:
    """Whether two values are known to be one."""
    if a is b:
        return True
    if isinstance(a, Held) and isinstance(b, Held):
        return a.it is b.it or (is_scalar(a.it) and type(a.it) is type(b.it) and repr(a.it) == repr(b.it))
    if isinstance(a, Items) and isinstance(b, Items):
        return a.type is b.type is tuple and len(a.parts) == len(b.parts) and all(map(alike, a.parts, b.parts))
    if isinstance(a, OneOf) and isinstance(b, OneOf):
        return len(a.values) == len(b.values) and all(map(alike, a.values, b.values))
    if isinstance(a, Bound) and isinstance(b, Bound):
        one, other = a.function, b.function
        same = alike(one, other) if isinstance(one, Value) and isa(other, Value) else one == other
        return same and len(a.args) == len(b.args) and all(map(alike, a.args, b.args)) and not a.kwargs | b.kwargs
    return isinstance(a, Dark) and isinstance(b, Dark)


def joined(values: Iterable[Value]) -> Value:
    """What is known of a value that is one of these."""
    found: list[Value] = []
    for value in values:
        for one in value.values if isinstance(value, OneOf) else (value,):
            if not any(alike(one, other) for other in found):
                found.append(one)
    if len(found) == 1:
        return found[0]
    dark = next((value for value in found if isinstance(value, Dark)), None)
    if dark is not None:
        return dark
    if all(isinstance(value, Held) and value.it is None or is_plain(value) for value in found):
        if all(value is TENSOR for value in found):
            return TENSOR
        mutable = [value for value in found if isinstance(value, Items) and value.type is not tuple]
        if not mutable:
            return SOMETHING if all(map(is_something, found)) else ANY
    if len(found) > _FEW:
        return Dark("one of too many values")
    return OneOf(tuple(found))


def is_something(value: Value) -> bool:
    """Whether a value is known not to be None."""
    if isinstance(value, Made):
        return value is not ANY
    if isinstance(value, Held):
        return value.it is not None
    return not isinstance(value, (Dark, OneOf)) or (isinstance(value, OneOf) and all(map(is_something, value.values)))


def value_of(given: Any, wrap: Callable[[Any], Value] = Held) -> Value:
    """What is known of an argument that a module was called with: a key holds its parts."""
    if isinstance(given, Tensor):
        return TENSOR
    if type(given) in (tuple, list):
        return Items(type(given), [value_of(item) for item in given], given=type(given) is list)
    if type(given) is dict:
        return Items(dict, {name: value_of(item) for name, item in given.items()}, given=True)
    if is_scalar(given):
        return Held(given)
    return Dark(f"a {type(given).__name__} that it was given")
