"""Stands for a parameter in a user's autograd Function: its whole value, plain, and in all else the parameter.

Such a Function may ask of which class a weight is, what is on it (`main_grad`), and write to its gradient itself, as
kernels do that add to it where they compute it. Its operands are whole, and alike on all ranks, so what it writes is
the whole gradient: `w.grad` is the parameter's, a DTensor, which takes it as anybody's `parameter.grad = value`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._torch_private import _disabled_torch_function_impl
from .tensor import DTensor, of_class


class StandIn(Tensor):
    """See the module."""

    __torch_function__ = _disabled_torch_function_impl

    @property
    def __class__(self) -> type:
        kind = self.__dict__["_of"].__class__
        return nn.Parameter if kind is DTensor else kind

    @property
    def grad(self) -> DTensor | None:
        return self.__dict__["_of"].grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.__dict__["_of"].grad = value

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__["_of"].__dict__
        return held[name] if name in held else of_class(self, self.__dict__["_of"]._kind, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(StandIn, name):
            return super().__setattr__(name, value)
        return setattr(self.__dict__["_of"], name, value)


def standing_in(whole: Tensor, parameter: DTensor) -> Tensor:
    """`whole`, which nobody else holds, as a stand-in for the parameter, or for that of which `parameter` was read."""
    parameter = parameter.__dict__.get("_of", parameter)
    if type(whole) is Tensor and "_is_param" in parameter.__dict__:
        whole.__class__ = StandIn
        whole.__dict__["_of"] = parameter
    return whole


def parameter_of(tensor: Any) -> Any:
    """Returns the parameter that a stand-in stands for, which a graph leads to by what modules hold as well, or the
    object itself."""
    return tensor.__dict__["_of"] if type(tensor) is StandIn else tensor
