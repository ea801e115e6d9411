"""Values inside what users hand around: the only place that knows kinds of containers.

A container is a dict, a UserDict (HuggingFace's BatchEncoding), a list, a tuple, a deque, a slice, a dataclass, or of a
class below these: namedtuples, torch's named results, OrderedDicts, ModelOutputs. Modules, classes and sets are leaves.
A container that stands in two places is visited twice. One that holds itself is visited once by `leaves`, and has no
end for the others, which raise Python's RecursionError.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = frozenset((type(None), bool, int, float, str))
"""Classes of leaves that hold nothing."""
_ATOMS = PLAIN | {type(...), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
_EQUAL = (int, float, complex, str, bytes, set, torch.device)
_KEYED = (dict, UserDict)
_INDEXED = (list, deque)


def parts(value: Any) -> Mapping[Any, Any] | None:
    """Returns what a container holds, by key, index or name; None for a leaf."""
    if type(value) is slice:
        return {"start": value.start, "stop": value.stop, "step": value.step}
    if isinstance(value, _KEYED):
        return value
    if isinstance(value, (tuple, *_INDEXED)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module, Tensor)):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
    return None


def with_parts(value: Any, changed: Mapping[Any, Any]) -> Any:
    """Returns a container of the same class and of the same parts but for those in `changed`."""
    if type(value) is dict:
        return {**value, **changed}
    if isinstance(value, tuple):
        items = [changed.get(i, item) for i, item in enumerate(value)]
        return getattr(type(value), "_make", type(value))(items)
    if isinstance(value, slice):
        return slice(*{**(parts(value) or {}), **changed}.values())
    fresh = copy.copy(value)
    if isinstance(value, (*_KEYED, *_INDEXED)):
        for key, item in changed.items():
            fresh[key] = item
    else:
        for name, item in changed.items():
            object.__setattr__(fresh, name, item)  # the dataclass may be frozen
    return fresh


def refill(value: Any, now: Mapping[Any, Any]) -> None:
    """Makes a mutable container hold these parts, in place; entries that it holds already are not written to."""
    if isinstance(value, _INDEXED):
        value.clear()
        value.extend(now.values())
    elif isinstance(value, _KEYED):
        for key in [*value]:
            if key not in now:
                del value[key]
        for key, item in now.items():
            if key not in value or value[key] is not item:
                value[key] = item
        if list(value) != list(now):
            for key in now:
                value[key] = value.pop(key)
    else:
        for name, item in now.items():
            if getattr(value, name, None) is not item:
                setattr(value, name, item)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Returns `value` with `function(tensor)` in place of every tensor; the same object where nothing changes."""
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is tuple or kind is list:  # on the hot path, as are dicts
        items = [map_tensors(item, function) for item in value]
        for new, old in zip(items, value):
            if new is not old:
                return items if kind is list else tuple(items)
        return value
    inside = value if kind is dict else parts(value)
    if not inside:
        return value
    changed = {}
    for key, old in inside.items():  # no comprehension: torch's compiler cannot read its cells
        if type(old) not in _ATOMS and (new := map_tensors(old, function)) is not old:
            changed[key] = new
    return with_parts(value, changed) if changed else value


def map_first(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Like `map_tensors`, for the first tensor only."""
    waiting = [function]
    return map_tensors(value, lambda tensor: waiting.pop()(tensor) if waiting else tensor)


def tensors_in(value: Any) -> list[Tensor]:
    """Returns every tensor of `value`, in the order of `map_tensors`."""
    found: list[Tensor] = []
    collect(value, found)
    return found


def collect(value: Any, tensors: list[Tensor]) -> None:
    """Appends every tensor of `value`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return
    kind = type(value)
    if kind in _ATOMS:
        return
    if kind is not tuple and kind is not list:
        inside = value if kind is dict else parts(value)
        if not inside:
            return
        value = inside.values()
    for item in value:
        collect(item, tensors)


def fill(template: Any, tensors: Iterable[Any]) -> Any:
    """Returns `template` with its tensors replaced by `tensors`, in order."""
    following = iter(tensors)
    return map_tensors(template, lambda _: next(following))


def copied(value: Any) -> Any:
    """Returns fresh containers around the same leaves: the caller may change them."""
    kind = type(value)
    if kind is tuple or kind is list:  # on the hot path
        return kind(map(copied, value))
    inside = None if isinstance(value, Tensor) else parts(value)
    return value if inside is None else with_parts(value, {key: copied(item) for key, item in inside.items()})


def same(value: Any, other: Any) -> bool:
    """Returns whether two values are one object, equal numbers, texts or sets, or containers of the same."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, _EQUAL):
        return value == other
    inside, others = parts(value), parts(other)
    if inside is None or others is None or inside.keys() != others.keys():
        return False
    return all(same(item, others[key]) for key, item in inside.items())


def leaves(value: Any, atoms: type | tuple[type, ...] = Tensor) -> Iterator[Any]:
    """Yields what `value` holds that is no container, or of a class in `atoms`; `value` itself where it is that."""
    return (leaf for _, leaf in named(value, "", atoms))


def named(
    value: Any, name: str, atoms: type | tuple[type, ...] = Tensor, around: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of `value`, each with its place: `name`, then a dot and a key per container."""
    inside = None if isinstance(value, atoms) else parts(value)
    if inside is None:
        yield name, value
    elif id(value) not in around:
        for key, item in inside.items():
            yield from named(item, f"{name}.{key}", atoms, (*around, id(value)))
