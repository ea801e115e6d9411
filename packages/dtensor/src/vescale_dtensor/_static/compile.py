"""A conversion as one operator, so that a compiler that traces a module meets no graph break at its collectives.

The operator runs the same recipe as in eager mode, over the same process groups: the
order of a sum stays. Its fake result is known from the target layout, its gradient is the
operator itself on the way back.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from .._conversions.steps import Route
from .._layouts.layout import Layout
from .._tensor.tensor import local_only

_routes: dict[int, Route] = {}
_numbers: dict[Route, int] = {}


def number_of(route: Route) -> int:
    """The route's name in a graph, made of all that it does: a compiler keeps graphs on disk, and finds a backward
    there by the numbers of the forward. It keeps the route alive, and the gradient's, whose graph may come from there.
    """
    for one in (route, route.back):
        if one not in _numbers:
            told = " -> ".join(map(_layout_text, (one.source, one.target)))
            _numbers[one] = number = int.from_bytes(blake2b(told.encode(), digest_size=7).digest())
            _routes[number] = one
    return _numbers[route]


def _layout_text(layout: Layout) -> str:
    states = [(one.kind, one.dim, one.groups, one.units, one.order) for one in layout.states]
    ranks = "" if layout.device_mesh is None else layout.device_mesh.mesh.tolist()
    return f"{tuple(layout.shape)} {states} on {layout.mesh} {ranks}"


@torch.library.custom_op("vescale::convert", mutates_args=())
def convert_numbered(local: Tensor, route: int) -> Tensor:
    """`local` along a numbered route: a fresh contiguous tensor."""
    with local_only():
        out = _routes[route](local)
        return out.clone(memory_format=torch.contiguous_format) if _is_part(out, local) else out.contiguous()


def _is_part(out: Tensor, local: Tensor) -> bool:
    return out.untyped_storage()._cdata == local.untyped_storage()._cdata


@convert_numbered.register_fake
def _(local: Tensor, route: int) -> Tensor:
    return local.new_empty(_routes[route].target.local_shape)


def _keep(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.route = inputs[1]


def _back(ctx, grad: Tensor) -> tuple[Tensor, None]:
    return convert_numbered(grad, _numbers[_routes[ctx.route].back]), None


convert_numbered.register_autograd(_back, setup_context=_keep)
