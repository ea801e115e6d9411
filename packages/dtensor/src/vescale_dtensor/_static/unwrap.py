"""DTensors as plain tensors for a while: the class is taken off the object and put back.

The object stays the same, so autograd's history, the gradient's accumulator with its
hooks, the version counter and every reference stay, and nothing is recorded. While a
region of plain code runs, its parameters are plain Parameters over their shards and its
activations plain tensors; a conversion in it is the same autograd Function as elsewhere,
remembered in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .._conversions.memo import recall, remember
from .._conversions.steps import Route, route_of
from .._layouts.layout import Layout
from .._tensor.tensor import DTensor, local_only, plain_class
from .cross import crossing


def unwrap(tensors: Iterable[Tensor]) -> list[DTensor]:
    """Makes plain those that are DTensors; returns them, for `wrap`."""
    unwrapped = []
    for tensor in tensors:
        if type(tensor) is DTensor:
            tensor.__class__ = plain_class(tensor)
            unwrapped.append(tensor)
    return unwrapped


def wrap(unwrapped: Iterable[Tensor]) -> None:
    """What was unwrapped is a DTensor again, of the layout that it had."""
    for tensor in unwrapped:
        tensor.__class__ = DTensor


def convert_unwrapped(tensor: Tensor, route: Route, cause: object, made: list[Tensor]) -> Tensor:
    """A local tensor along a route, differentiable and remembered as on DTensors.

    `made` gets the result, its layout noted on it: to be given to `wrap` with what was unwrapped.
    """
    target: Layout = route.target
    with local_only():
        known = recall(tensor, target)
        if known is None:
            known = crossing(route, cause)(tensor)
            if known is tensor:
                return tensor
            known._layout = target
            remember(tensor, target, known, moves=not route.is_alias)
    known.__class__ = plain_class(known)
    made.append(known)
    return known


def route_between(source: Layout, target: Layout) -> Route:
    """The recipe for `convert_unwrapped`."""
    return route_of(source, target)
