"""The arguments of a call: the key of its decision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._tensor.tensor import DTensor
from .functorch import is_followed

ATOMS = frozenset(
    {int, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
KEYWORDS = object()  # divides positional from keyword arguments in a key
_INTS = frozenset({int})
_BOOL = {True: "true", False: "false"}  # True == 1 as a key, and x[True] is not x[1]


def key_of(args: tuple, kwargs: dict | None, exact: bool) -> tuple:
    """The key of a call: layouts in place of DTensors, stand-ins for what has no hash or another equality."""
    key = []
    for item in args:
        kind = type(item)
        if kind is DTensor:  # not looked for among others: its hash is Python
            key.append(item._layout)
        elif kind in ATOMS:
            key.append(item)
        else:
            key.append(keyed(item, exact))
    if kwargs:
        key.append(KEYWORDS)
        for name, item in kwargs.items():
            kind = type(item)
            key += (name, item if kind is int else _BOOL[item] if kind is bool else keyed(item, exact))
    return tuple(key)


def keyed(value: Any, exact: bool) -> Any:
    """The hashable stand-in of an argument that is neither a DTensor nor an atom by itself."""
    kind = type(value)
    if kind is tuple:
        if value and type(value[0]) is int and _INTS.issuperset(map(type, value)):  # sizes: as they are
            return value
        return key_of(value, None, exact)
    if kind is slice:
        start, stop, step = value.start, value.stop, value.step
        if step is None and (start is None or type(start) is int) and (stop is None or type(stop) is int):
            return (slice, start, stop)
        return (slice, keyed(start, exact), keyed(stop, exact), keyed(step, exact))
    if kind is float:
        return (float, value) if exact else float
    if kind is Tensor:
        return (kind, value.shape, value.layout, value.requires_grad, is_followed(value))
    if kind is DTensor:
        return value._layout
    if kind is bool:
        return _BOOL[value]
    if kind in ATOMS:
        return value
    if kind is list:  # x[[0, 1]] is not x[0, 1]
        return (list, *key_of(value, None, exact))
    if isinstance(value, Tensor):
        if getattr(kind, "before_dtensor", False):  # it is not to be asked anything
            return kind
        return (kind, value.shape, value.layout, value.requires_grad, is_followed(value))
    if kind is dict:
        return tuple([(name, keyed(item, exact)) for name, item in value.items()])
    return (kind, value)  # numpy.True_ == 1: the type is part of it
