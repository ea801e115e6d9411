"""Tensors inside what modules take and return: tuples, lists, dicts, dataclasses, HuggingFace's ModelOutput."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

PLAIN = frozenset((type(None), bool, int, float, str))


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """`value` with `function(tensor)` in place of every tensor; the same object where nothing changed."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, Tensor):
        return function(value)
    if kind is tuple or kind is list:
        items = [map_tensors(item, function) for item in value]
        for new, old in zip(items, value):
            if new is not old:
                return items if kind is list else tuple(items)
        return value
    if isinstance(value, dict):
        if not value:
            return value
        changed = {k: new for k, old in value.items() if (new := map_tensors(old, function)) is not old}
        if not changed:
            return value
        fresh = copy.copy(value)  # keeps the class: an OrderedDict, a ModelOutput
        for name, item in changed.items():
            fresh[name] = item
        return fresh
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        items = [map_tensors(part, function) for part in parts]
        return value if all(new is old for new, old in zip(items, parts)) else slice(*items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: new
            for field in dataclasses.fields(value)
            if (new := map_tensors(getattr(value, field.name), function)) is not getattr(value, field.name)
        }
        return dataclasses.replace(value, **changed) if changed else value
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in `value`, in order."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


def fill(template: Any, tensors: Iterable[Any]) -> Any:
    """`template` with its tensors replaced by `tensors`, in order."""
    following = iter(tensors)
    return map_tensors(template, lambda _: next(following))


def copied(value: Any) -> Any:
    """Fresh lists, dicts and dataclasses around the same tensors: the caller may change them."""
    if type(value) in PLAIN or isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        fresh = copy.copy(value)
        for name, item in value.items():
            fresh[name] = copied(item)
        return fresh
    if isinstance(value, list):
        return [copied(item) for item in value]
    if isinstance(value, tuple):
        items = [copied(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fresh = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(fresh, field.name, copied(getattr(value, field.name)))  # it may be frozen
        return fresh
    return value
