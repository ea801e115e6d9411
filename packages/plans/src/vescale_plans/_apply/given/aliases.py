"""Tensors that share memory with a model's parameters, which move into shards: an alias would keep the values of now.

On one device a view of a parameter, made before training, follows it. `parallelize` keeps the parameter's object; other
tensors over its memory it cannot follow. In the model (an attribute, a buffer, a second parameter) that is an error,
elsewhere (a state dict that is kept, a list of `p.detach()`) a warning. Memory that nobody shares is told by its count
of owners, and nothing is searched.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vescale_rng import is_deferred
from vescale_trace.stack import users_level

from ..._plan.parts import PlanError
from ..._torch_private import owners_of

_ALONE = 2  # owners: the tensor, and the Python object that asks
_DEPTH, _MOST, _SHOWN = 6, 20_000, 4
_LEGACY = "_orig"
"""torch.nn.utils.spectral_norm keeps `weight_orig`, and over its memory `weight`, which a hook makes anew per call."""


class SharedMemoryWarning(UserWarning):
    """Tensors outside the model keep the values that its parameters had before `parallelize`."""


def check_aliases(model: nn.Module) -> None:
    """Raises PlanError where the model holds parts of a parameter's memory that are not the parameter; warns of others.

    Cost: nothing to speak of where no memory is shared, else one look at all objects of the process. No communication.
    """
    shared: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if is_deferred(parameter) or parameter.is_meta or parameter.layout is not torch.strided:
            continue
        if owners_of(parameter) > _ALONE:
            shared.setdefault(parameter.untyped_storage()._cdata, []).append((name, parameter))
    if not shared:
        return
    known = {id(tensor) for held in shared.values() for _, tensor in held}
    found: dict[int, tuple[str, Tensor]] = {}  # by the alias's id: the parameter's name
    for tensor in (one for one in gc.get_objects() if issubclass(type(one), Tensor)):
        for name, parameter in _sharing(tensor, shared):
            if tensor is not parameter and _overlap(parameter, tensor):
                found[id(tensor)] = name, tensor
    for tensor in _made_anew(model):
        found.pop(id(tensor), None)
    if not found:
        return
    for place, tensor in _held_by(model):
        if id(tensor) in found and not (id(tensor) in known and place == found[id(tensor)][0]):
            _refuse(place, found[id(tensor)][0])
    names = list(dict.fromkeys(name for name, _ in found.values()))
    warnings.warn(
        f"parallelize: {len(found)} tensors outside of the model share memory with its parameters "
        f"({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}). They keep their current values, and "
        "the memory: parameters live in shards from here on. Delete them, or clone() those that you need.",
        SharedMemoryWarning,
        stacklevel=users_level(),
    )


def _sharing(tensor: Tensor, shared: dict[int, list[tuple[str, Tensor]]]) -> list[tuple[str, Tensor]]:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided or tensor.is_meta:
        return []
    return shared.get(tensor.untyped_storage()._cdata, [])


def _overlap(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one storage have an element in common."""
    (low, high), (lower, higher) = _extent(one), _extent(other)
    if not one.numel() or not other.numel() or high <= lower or higher <= low:
        return False
    if one.dtype != other.dtype or one.is_contiguous() or other.is_contiguous():
        return True
    size = one.element_size()  # two interleaved parts, as columns of one matrix
    first = min(low, lower) // size
    taken = torch.zeros(max(high, higher) // size - first, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from its first element to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    first = tensor.storage_offset()
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _held_by(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a model's modules hold, in whatever they keep, and where."""
    left = _MOST
    for path, module in model.named_modules(remove_duplicate=True):
        prefix = f"{path}." if path else ""
        waiting = [(prefix + name, value, 0) for held in _members(module) for name, value in held]
        seen: set[int] = set()
        while waiting and left:
            place, value, depth = waiting.pop()
            left -= 1
            if isinstance(value, Tensor):
                yield place, value
            elif id(value) not in seen and depth < _DEPTH:
                seen.add(id(value))
                waiting += [(place + step, inner, depth + 1) for step, inner in _inside(value)]


def _members(module: nn.Module) -> Iterator[list[tuple[str, Any]]]:
    own = dict(vars(module))
    for held in (own.pop("_parameters"), own.pop("_buffers")):
        yield [(name, tensor) for name, tensor in held.items() if tensor is not None]
    own.pop("_modules")
    yield list(own.items())


def _made_anew(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        for name in module._parameters:
            if name.endswith(_LEGACY):
                yield vars(module).get(name.removesuffix(_LEGACY))


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values inside an object; nothing for modules, classes and whatever is not Python's."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", one) for key, one in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", one) for i, one in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((f"({i})", one) for i, one in enumerate((*value.args, *value.keywords.values(), value.func)))
    elif isinstance(value, MethodType):
        yield "", value.__self__
    elif isinstance(value, FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or ()):
            try:
                yield f"({name})", cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from ((f"({i})", one) for i, one in enumerate(value.__defaults__ or ()))
    elif not isinstance(value, (nn.Module, type, ModuleType, str, bytes, int, float)) and hasattr(value, "__dict__"):
        yield from ((f".{key}", one) for key, one in list(vars(value).items()))


def _refuse(place: str, name: str) -> None:
    raise PlanError(
        "parallelize",
        f"{place} shares the memory of the parameter {name}, which moves into shards: it would keep its current "
        "values, while on one device it follows the training",
        (),
        [
            (f"take it in forward, of self.{name.rpartition('.')[2]}", "a view of a parameter is cheap"),
            ("register the same Parameter object under both names", "a tie: one parameter stays one parameter"),
            (".clone()", "if the current values are meant"),
        ],
    )
