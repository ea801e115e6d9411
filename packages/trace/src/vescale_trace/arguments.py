"""Arguments of public functions, checked in one place: by the types that their signatures name."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import chain, repeat
from numbers import Integral, Real
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from .errors import VescaleError
from .text import shown

P = ParamSpec("P")
T = TypeVar("T")
MOST = 2**63
"""Numbers that torch counts with are below."""


def typed_call(
    function: Callable[P, T], error: type[VescaleError] = VescaleError, *, by_type: bool = True
) -> Callable[P, T]:
    """Returns a public function whose calls raise `error` where the arguments do not fit: a name that it does not
    know, one too many, one missing, with `by_type` a value of another type than its signature says. What its code
    raises is left alone."""
    signature = inspect.signature(function)
    by_place = [one.name for one in signature.parameters.values() if one.kind < one.VAR_POSITIONAL]
    rest = [one.name for one in signature.parameters.values() if one.kind == one.VAR_POSITIONAL]

    hints: list[dict[str, Any]] = []  # from the first call on: a class that it names may be made later
    refused = functools.partial(_refused, function, error)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not hints:
            names = signature.parameters if by_type else ()
            hints.append({name: hint for name in names if (hint := _hint(function, name)) is not Any})
        (known,) = hints
        for name, value in chain(zip(chain(by_place, repeat(*rest) if rest else ()), args), kwargs.items()):
            if name in known and not fits(value, known[name]):
                kind = _said(known[name], function.__annotations__[name])
                raise refused(f"{name} is {shown(value)}, not {kind}", name)
        try:
            return function(*args, **kwargs)
        except TypeError as found:
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                raise refused(str(found).partition("() ")[2] or str(found)) from None
            raise

    return call


def typed_facade(names: dict[str, Any], error: type[VescaleError], *classes: type) -> None:
    """Makes the functions that a package gives away, and the methods of these classes, as by `typed_call`, given its
    `globals()`: what is called inside of the package, in each step or for each tensor, is not checked."""
    package = names["__name__"]
    for name, one in [*names.items()]:
        if inspect.isfunction(one) and name[0] != "_":
            if one.__module__.startswith(f"{package}."):
                names[name] = one = typed_call(one, error)
            if getattr(sys.modules.get(one.__module__), one.__qualname__, None) is not one:
                one.__module__ = package  # where pickle finds it
    for kind in classes:
        typed_methods(kind, error)


def typed_methods(kind: type, error: type[VescaleError]) -> None:
    """Makes a class's constructor and public methods as by `typed_call`. The values of a dataclass are its own to
    check."""
    for name, one in [*vars(kind).items()]:
        if name == "__init__" or not name.startswith("_"):
            if inspect.isfunction(one):
                setattr(kind, name, typed_call(one, error, by_type=name != "__init__" or not is_dataclass(kind)))
            elif isinstance(one, classmethod):
                setattr(kind, name, classmethod(typed_call(one.__func__, error)))


def torch_call(function: Callable[P, T]) -> Callable[P, T]:
    """Returns a function that hands its arguments on to torch; what torch refuses of them is a VescaleError."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            if isinstance(error, (VescaleError, torch.OutOfMemoryError)):
                raise
            raise VescaleError(function.__name__, str(error).partition("\n")[0]) from error

    return call


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value is of the type that an annotation names. Text is no collection, and what an iterator
    yields is not looked at."""
    hint = os.PathLike if hint is Path else hint  # what stands for a path may be of any class
    origin, inside = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inside)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inside)
    if origin in (bool, int, float, complex) and isinstance(value, Real):
        return origin in (float, complex) or isinstance(value, Integral) and -MOST <= int(value) < MOST
    if hint in (None, Any, object) or not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return hint is not None or value is None
    if not isinstance(value, origin) or isinstance(value, (str, bytes)) and issubclass(Sequence, origin):
        return origin is bool and getattr(value, "dtype", None) == bool  # noqa: E721 - numpy's
    if not inside or not isinstance(value, Collection) or not issubclass(origin, (Iterable, tuple)):
        return True
    if issubclass(origin, Mapping) and isinstance(value, Mapping):
        return all(map(fits, value, repeat(inside[0]))) and all(map(fits, value.values(), repeat(inside[1])))
    if origin is tuple and inside[-1] is not ...:
        return len(value) == len(inside) and all(map(fits, value, inside))
    return all(map(fits, value, repeat(inside[0])))


def _hint(function: Callable, name: str) -> Any:
    """Returns the type that an annotation names; Any where there is none, or a name that only type checkers know."""
    written = SimpleNamespace(__annotations__={name: function.__annotations__.get(name, Any)})
    try:
        return get_type_hints(written, inspect.unwrap(function).__globals__)[name]
    except NameError:
        return Any


def _said(hint: Any, written: Any) -> str:
    """Returns a type as an error names it: by its values where these are few, else as the signature does."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return getattr(written, "__name__", written)


def _refused(function: Callable, error: type[VescaleError], rule: str, name: str = "") -> VescaleError:
    """Builds the error, which also says of a parameter what the docstring does."""
    called = function.__qualname__.removesuffix(".__init__")
    takes = ", ".join(one for one in inspect.signature(function).parameters if one not in ("self", "cls"))
    told = rf"^    (?:\w+, )*{name}(?:, \w+)*: (.+(?:\n {{8}}.+)*)"
    found = re.search(told, inspect.getdoc(function) or "", re.MULTILINE) if name else None
    about = [f"{name}  {' '.join(found[1].split()).partition('. ')[0]}"] if found else []
    return error(called, rule, [f"takes  {takes}", *about], [(f"help({called})", "says what each one is for")])
