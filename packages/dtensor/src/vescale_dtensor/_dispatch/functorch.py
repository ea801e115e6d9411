"""torch.func and vmap wrap tensors in C++, below everything that a subclass sees: what enters them is refused.

A wrapped DTensor is a plain tensor of this rank's shard, and the function would run on
it as if the shard were all. A plain tensor that is wrapped, or a dual number, would lose
what the transform follows where it becomes a DTensor. Five places hear of it:

    vmap                        asks `tensor.dim()` of every mapped argument before it wraps them
    grad, vjp, functionalize    (so jacrev, hessian, linearize) look each argument's class up in the table of containers
    jvp, jacfwd                 make dual numbers of the arguments, by a function that dispatches
    any transform               a wrapped tensor meets a DTensor that the function holds otherwise, or one is converted
    a parallelized model        a wrapped tensor, or a dual number, enters it
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from vescale_trace.stack import frames

from .._errors import OperatorError
from .._rules.registry import handler
from .._torch_private import (
    _are_functorch_transforms_active,
    _make_dual,
    _process_batched_inputs,
    _wrap_all_tensors,
    _wrap_all_tensors_to_functional,
    dual_level,
)
from .._torch_private import is_functorch_wrapped_tensor as is_wrapped

_MAPS = _process_batched_inputs.__code__
_WRAPS = {_wrap_all_tensors.__code__, _wrap_all_tensors_to_functional.__code__}
_TRANSFORMS = {"grad_and_value_impl": "grad", "_vjp_with_argnums": "vjp", "_jvp_with_argnums": "jvp"}
_REMEDIES = [
    ("call the function without the transform", "batch dims and torch.autograd.grad(outputs, inputs) work on DTensors"),
    ("local_map(torch.vmap(function), ...)", "to run it on the shards"),
]


class TensorType(type(torch.Tensor)):
    """The class of DTensor. Its hash, by which pytrees look a leaf's class up, tells when a transform wraps one."""

    def __hash__(cls) -> int:
        if _are_functorch_transforms_active():
            _check_not_wrapping()
        return type.__hash__(cls)


def _check_not_wrapping() -> None:
    """Raises when it is a transform that goes through its arguments."""
    around = frames()
    if any(frame.f_code in _WRAPS for frame in around):
        name = _TRANSFORMS.get(next(around).f_code.co_name, "functionalize")
        refuse(name, f"an argument is a DTensor, and {name} would run on this rank's shard of it alone")


def check_not_mapped() -> None:
    """Called by `DTensor.dim`: raises when it was vmap that asked."""
    if sys._getframe(2).f_code is _MAPS:
        refuse("vmap", "an argument is a DTensor, and vmap would run on this rank's shard of it alone")


def is_followed(tensor: torch.Tensor) -> bool:
    """True if a transform has wrapped the tensor, or forward-mode differentiation gave it a tangent."""
    if is_wrapped(tensor):
        return True
    if dual_level() < 0 or type(type(tensor)) is TensorType:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


def check_not_wrapped(function: Any, tensors: list) -> None:
    """Raises when a tensor that a transform has wrapped is among those that meet a DTensor."""
    if any(is_followed(tensor) for tensor in tensors):
        name = getattr(function, "__name__", str(function))
        refuse(
            name,
            "a tensor inside torch.vmap, a transform of torch.func or forward-mode differentiation meets a DTensor, "
            "and has no layout",
        )


def check_entering(operation: str, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Raises when one of what enters a model is followed by a transform; outside of these nobody asks what enters."""
    if (_are_functorch_transforms_active() or dual_level() >= 0) and any(map(is_followed, tensors())):
        refuse(
            operation,
            "a tensor inside torch.vmap, a transform of torch.func or forward-mode differentiation enters a "
            "parallelized model, whose tensors these do not follow",
        )


def check_outside(operation: str) -> None:
    """Raises when a transform wraps what every function returns (all but vmap do): no collective can run on that."""
    if is_wrapped(torch.empty(0)):
        refuse(operation, "a DTensor is converted inside a transform of torch.func, which wraps even new tensors")


def refuse(operation: str, rule: str) -> NoReturn:
    raise OperatorError(operation, rule, (), _REMEDIES)


@handler(_make_dual)
def make_dual(function: Callable, args: tuple, kwargs: dict) -> NoReturn:
    refuse("jvp", "an argument is a DTensor, and a dual number of it would be of this rank's shard alone")
