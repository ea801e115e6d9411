"""`torch.utils.swap_tensors` of a parameter in a flat buffer, which holds the object by a weak reference.

torch refuses an object of which there are any. What such an exchange is for, other values under the same object, is
done by assignment: data and gradients change places. Hooks, which torch would exchange as well, are refused.
"""

from __future__ import annotations

from functools import wraps
from weakref import getweakrefs

import torch
from torch import Tensor

from .._errors import OperatorError
from .tensor import DTensor, local_only

_swap = torch.utils.swap_tensors


@wraps(_swap)
def swap_tensors(t1: Tensor, t2: Tensor) -> None:
    if any(type(one) is DTensor and "_owner" in one.__dict__ and getweakrefs(one) for one in (t1, t2)):
        return _exchange(t1, t2)
    for one in (t1, t2):
        if type(one) is DTensor:
            _ = one._layout  # on its way it may not change places
    return _swap(t1, t2)


def _exchange(one: Tensor, other: Tensor) -> None:
    with local_only():
        for tensor in (one, other):
            owner = tensor.__dict__.get("_owner")  # who keeps users' hooks beside its own
            hooks = tensor._post_accumulate_grad_hooks if owner is None else owner.hooks
            if hooks or tensor._backward_hooks:
                _refuse("have hooks")
    if one.shape != other.shape or one.dtype != other.dtype or one.requires_grad != other.requires_grad:
        _refuse("differ in shape, dtype or requires_grad")
    gradients, values = (one.grad, other.grad), (one.data.clone(), other.data.clone())
    one.grad = other.grad = None
    one.data, other.data = values[1], values[0]
    one.grad, other.grad = gradients[1], gradients[0]


def _refuse(what: str) -> None:
    raise OperatorError(
        "swap_tensors",
        f"one of the tensors is a parameter in a flat buffer, and they {what}: values and gradients alone can change "
        "places",
        [],
        [("parameter.data = value", "its values; nothing else of it changes")],
    )


torch.utils.swap_tensors = swap_tensors
