"""torch.func and vmap wrap tensors in C++, below everything that a subclass sees: what can be told is refused.

A wrapped DTensor is a plain tensor of this rank's shard, and the function runs on it
as if the shard were all. Three places still hear of it:

    vmap                        asks `tensor.dim()` of every mapped argument before it wraps them
    jvp, jacfwd, hessian        make dual numbers of the arguments, by a function that dispatches
    any transform               a wrapped tensor meets a DTensor that the function holds otherwise

`grad`, `vjp` and `jacrev` of a DTensor argument call nothing of it before they wrap it, and their function nothing
afterwards: that stays unseen (docs/coverage.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._functorch import vmap as _vmap

from ._errors import OperatorError
from ._rules.registry import handler

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_MAPS = _vmap._process_batched_inputs.__code__
_REMEDIES = [
    ("call the function without the transform", "batch dims and torch.autograd.grad(outputs, inputs) work on DTensors"),
    ("local_map(torch.vmap(function), ...)", "on the shards, when that is what is meant"),
]


def check_not_mapped() -> None:
    """Called by `DTensor.dim`: raises when it was vmap that asked."""
    if sys._getframe(2).f_code is _MAPS:
        refuse("vmap", "an argument is a DTensor, and vmap would run on this rank's shard of it alone")


def check_not_wrapped(function: Any, tensors: list) -> None:
    """Raises when a tensor that a transform has wrapped is among those that meet a DTensor."""
    if any(is_wrapped(tensor) for tensor in tensors):
        name = getattr(function, "__name__", str(function))
        refuse(name, "a tensor inside torch.vmap or a transform of torch.func meets a DTensor, and has no layout")


def refuse(operation: str, rule: str) -> NoReturn:
    raise OperatorError(operation, rule, (), _REMEDIES)


@handler(torch._VF._make_dual)
def make_dual(function: Callable, args: tuple, kwargs: dict) -> NoReturn:
    refuse("jvp", "an argument is a DTensor, and a dual number of it would be of this rank's shard alone")
