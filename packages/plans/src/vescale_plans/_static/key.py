"""The key of a call: everything about its arguments, and around it, that a region was found for."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from vescale_dtensor import DTensor
from vescale_dtensor.engine import unwrap

from .._torch_private import global_forward_hooks, has_global_backward_hooks

_VALUES = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})


def take_key(args: tuple, kwargs: dict) -> tuple[tuple | None, list[DTensor]]:
    """The key, or None where an argument cannot be compared; and the inputs that it unwrapped, for `wrap`."""
    found: list = []
    tensors: list[Tensor] = []
    if not (_describe(args, found, tensors) and (not kwargs or _describe(kwargs, found, tensors))):
        return None, []
    unwrapped = unwrap(tensors)
    for tensor in tensors:
        found.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad))
    if len(tensors) > 1 and len({*map(id, tensors)}) < len(tensors):  # one tensor in several places
        first: dict[int, int] = {}
        found.append(tuple([first.setdefault(id(tensor), i) for i, tensor in enumerate(tensors)]))
    found.append(is_grad_enabled())
    found.append(torch.is_inference_mode_enabled())
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        found += [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return tuple(found), unwrapped


def _describe(value: Any, found: list, tensors: list[Tensor]) -> bool:
    kind = type(value)
    if kind is DTensor:
        found.append(value._layout)
        tensors.append(value)
    elif kind is tuple or kind is list:
        found.append((kind, len(value)))
        for item in value:
            if not _describe(item, found, tensors):
                return False
    elif kind is float or kind is complex:
        found.append((kind, repr(value)))  # 0.0 == -0.0
    elif kind in _VALUES:
        found.append((kind, value))  # 1 == True
    elif isinstance(value, Tensor):
        found.append(kind)
        tensors.append(value)
    elif kind is slice:
        found.append(slice)
        return _describe((value.start, value.stop, value.step), found, tensors)
    elif isinstance(value, dict):
        found.append((kind, tuple(value), tuple(map(type, value))))
        for item in value.values():
            if not _describe(item, found, tensors):
                return False
    elif isinstance(value, enum.Enum):
        found.append((kind, value))  # members of two IntEnums may be equal
    else:
        return False
    return True


_KNOWING = "vescale_dtensor.debug"
"""Of hooks of all modules, those that do on plain shards what they do on DTensors."""


def foreign_global_hooks() -> bool:
    """Whether somebody watches every module's call: such hooks see what modules take, or its gradients."""
    if has_global_backward_hooks():
        return True
    before, after = global_forward_hooks()
    if not (before or after):
        return False
    return any(getattr(hook, "__module__", "") != _KNOWING for hook in (*before.values(), *after.values()))
