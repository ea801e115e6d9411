"""The tensors that a `score_mod` or a `mask_mod` has with it, found and replaced: in closures, defaults and partials.

Such a function is written on one device, so what it has with it is whole there: a bias per head, the documents of a
batch. Of a DTensor among them the function, which torch compiles, would see this rank's shard under its local shape.
So each is an operand of the call like queries and keys, converted by dispatch, with a gradient that comes back the
same way; and the function is made again, of the same code, with the converted tensors in their cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NoReturn

from torch import Tensor, nn

from .._errors import OperatorError
from .._tensor.tensor import DTensor, requires_grad

By = Mapping[int, Tensor]


def captured(*mods: Callable | None) -> list[Tensor]:
    """DTensors, and plain tensors with gradient, that the functions have with them: each once, in the order of the
    code. Raises OperatorError for a DTensor that they reach in a way in which no other can be put in its place."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    for mod in mods:
        for tensor in _tensors(mod, seen):
            if type(tensor) is DTensor or requires_grad(tensor):
                found[id(tensor)] = tensor
    return list(found.values())


def replaced(value: Any, by: By) -> Any:
    """`value` with `by[id(tensor)]` in place of the tensors named there; the same object where there are none."""
    return _replaced(value, by, {}) if by else value


def _parts(value: Any) -> list[Any]:
    """Returns the parts of a value that may be replaced."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if type(value) in (tuple, list):
        return list(value)
    return list(value.values()) if type(value) is dict else []


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        _check_reads(value)
    elif isinstance(value, MethodType) or not isinstance(value, (type, nn.Module)):
        _check_object(value)
    for part in _parts(value):
        yield from _tensors(part, seen)


def _check_reads(function: FunctionType) -> None:
    """Raises where the function's code names a DTensor among its globals, or in a module that it has with it."""
    modules = [one for one in _parts(function) if isinstance(one, nn.Module)]
    for name in function.__code__.co_names:
        if type(function.__globals__.get(name)) is DTensor:
            _refuse(function.__name__, f"the global {name!r}", function.__globals__[name], name)
        for module in modules:
            tensor = module._parameters.get(name, module._buffers.get(name))
            if type(tensor) is DTensor:
                _refuse(function.__name__, f"the attribute {name!r} of {type(module).__name__}", tensor, f"self.{name}")


def _check_object(value: Any) -> None:
    """Raises where a method's object, or one that is called, holds a DTensor."""
    name = getattr(value, "__name__", type(value).__name__)
    owner = value.__self__ if isinstance(value, MethodType) else value
    if isinstance(owner, nn.Module) and isinstance(value, MethodType):
        held = {**owner._parameters, **owner._buffers}
        held = {key: one for key, one in held.items() if key in value.__func__.__code__.co_names}
    else:
        held = getattr(owner, "__dict__", {})
    for key, one in held.items():
        if type(one) is DTensor:
            _refuse(name, f"the attribute {key!r} of {type(owner).__name__}", one, f"{type(owner).__name__}.{key}")


def _refuse(name: str, what: str, tensor: DTensor, read: str) -> NoReturn:
    raise OperatorError(
        "flex_attention",
        f"{name} reads a DTensor, {what}: the function runs on this rank's shards, and what it reads there is not "
        "brought to it",
        [f"{read}  {tensor._layout.base!r}"],
        [(f"bias = {read}", "before the function is defined, and in it `bias`: what a closure holds is brought to it")],
    )


def _replaced(value: Any, by: By, made: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if id(value) in made:
        return made[id(value)]
    made[id(value)] = value  # a function that names itself keeps itself
    parts = _parts(value)
    fresh = [_replaced(part, by, made) for part in parts]
    if not all(new is old for new, old in zip(fresh, parts)):
        made[id(value)] = _made_of(value, iter(fresh))
    return made[id(value)]


def _made_of(value: Any, fresh: Iterator[Any]) -> Any:
    """`value` of other parts, in the order of `_parts`."""
    if isinstance(value, FunctionType):
        cells = tuple(CellType(next(fresh)) if _is_full(cell) else cell for cell in value.__closure__ or ())
        other = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        if value.__defaults__ is not None:
            other.__defaults__ = tuple(next(fresh) for _ in value.__defaults__)
        if value.__kwdefaults__ is not None:
            other.__kwdefaults__ = {name: next(fresh) for name in value.__kwdefaults__}
        return other
    if isinstance(value, partial):
        function, args = next(fresh), [next(fresh) for _ in value.args]
        return partial(function, *args, **{name: next(fresh) for name in value.keywords})
    return dict(zip(value, fresh)) if isinstance(value, dict) else type(value)(fresh)


def _is_full(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises where nothing is in it yet
    except ValueError:
        return False
    return True
