"""The Python body of a torch function, without its check for `__torch_function__`.

Functions of torch.nn.functional that are written in Python hand over to
`__torch_function__` first and have their formula below. `body_of` gives the
formula alone: a copy of the function whose globals say that nothing overrides
torch, so that run on DTensors each call inside it is dispatched by itself.
torch's own function is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType

from torch import Tensor

from .._conversions.convert import from_plain
from .._layouts.layout import layout_of
from .._layouts.mesh import Mesh
from .._layouts.state import INVARIANT
from .._tensor.tensor import DTensor


def _never(*_) -> bool:
    return False


_CHECKS = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never)


@cache
def body_of(function: FunctionType) -> Callable:
    """`function` below its override check."""
    copy = FunctionType(
        function.__code__, {**function.__globals__, **_CHECKS}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def run_body(function: FunctionType, mesh: Mesh) -> Callable:
    """The body on DTensors; what an operation on plain tensors alone would compute with gradient is lifted first."""
    body = body_of(function)

    def run(*args, **kwargs):
        return body(*[lifted(a, mesh) for a in args], **{name: lifted(a, mesh) for name, a in kwargs.items()})

    return run


def lifted(value, mesh: Mesh):
    """A plain tensor that requires grad as a DTensor (I), so that what is computed from it keeps its layout.

    Anything else as it is: a plain tensor without gradient may stay plain until it meets a DTensor.
    """
    if isinstance(value, Tensor) and type(value) is not DTensor and value.requires_grad:
        shape = tuple(value.shape)
        return from_plain(value, layout_of(mesh, (INVARIANT,) * len(mesh.sizes), shape))
    return value
