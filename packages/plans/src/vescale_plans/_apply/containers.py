"""Tensors inside what modules take and return: tuples, dicts, dataclasses, HuggingFace's ModelOutput."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function(tensor)` in place of every tensor; the same object where nothing changed."""
    if isinstance(value, Tensor):
        return function(value)
    if value is None:  # the compiler of torch 2.11 cannot ask its class for fields
        return value
    if isinstance(value, dict):
        changed = {k: new for k, old in value.items() if (new := map_tensors(old, function)) is not old}
        if not changed:
            return value
        fresh = copy.copy(value)  # keeps the class: an OrderedDict, a ModelOutput, a BatchEncoding
        for name, item in changed.items():
            fresh[name] = item
        return fresh
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            f.name: new
            for f in dataclasses.fields(value)
            if (new := map_tensors(getattr(value, f.name), function)) is not getattr(value, f.name)
        }
        return dataclasses.replace(value, **changed) if changed else value
    return value


def map_first(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Like `map_tensors`, for the first tensor only."""
    if isinstance(value, Tensor):
        return function(value)
    done = False

    def once(tensor: Tensor) -> Tensor:
        nonlocal done
        if done:
            return tensor
        done = True
        return function(tensor)

    return map_tensors(value, once)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of `value`, in order."""
    found: list[Tensor] = []
    map_tensors(value, lambda one: found.append(one) or one)
    return found
