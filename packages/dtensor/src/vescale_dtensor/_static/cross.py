"""A conversion between plain tensors, made ready both ways: what a region runs at its boundaries.

Nothing is looked up when it runs: route, way back and cause are bound when the region is
found, and nothing is remembered. Four Python calls forward and five backward, as a
hand-written autograd Function around a collective has.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, is_grad_enabled
from torch.autograd import Function

from .._communication import events
from .._communication.collectives import Recipe
from .._conversions.convert import convert_tracked
from .._conversions.steps import Route
from .._tensor.tensor import local_only
from .._torch_private import _are_functorch_transforms_active


class Cross(Function):
    """Local tensor -> local tensor, both plain."""

    @staticmethod
    def forward(ctx, local: Tensor, run: Recipe, way: tuple[Route, object]) -> Tensor:
        ctx.way = way
        if local.is_neg() or local.is_conj():
            local = local.resolve_conj().resolve_neg()
        return run(local)

    @staticmethod
    def backward(ctx, grad: Tensor):
        back, cause = ctx.way
        events.restore_cause(cause)
        if type(grad) is not Tensor or grad.is_neg() or grad.is_conj() or is_grad_enabled():
            with local_only():
                if is_grad_enabled():
                    return convert_tracked(grad, back, False), None, None
                return back(grad.detach()), None, None
        return back.run(grad), None, None


# Without functorch's wrappers, which `Function.apply` looks for in Python; and what the engine calls in a backward,
# without looking for the name that a user may have given it.
_apply = super(Function, Cross).apply
Cross._backward_cls.apply = Cross.backward


def crossing(route: Route, cause: object) -> Callable[[Tensor], Tensor]:
    """The conversion along `route`, differentiable, for plain tensors; `cause` is who asks for it."""

    run, way = route.run, (route.back, cause)

    def cross(tensor: Tensor) -> Tensor:
        events.set_cause(cause)
        if events.watch is not None:
            return events.watch(lambda tensor, *_: _along(tensor, route), tensor, route.source, route.target)
        if is_grad_enabled() and tensor.requires_grad and not _are_functorch_transforms_active():
            return _apply(tensor, run, way)
        return _along(tensor, route)

    return cross


def _along(tensor: Tensor, route: Route) -> Tensor:
    if is_grad_enabled() and tensor.requires_grad:
        return convert_tracked(tensor, route, False)
    return route(tensor)
