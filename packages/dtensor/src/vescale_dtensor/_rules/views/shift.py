"""A dim that one axis cuts, moved along by some places: long slices and pads keep the cut, and only the rows at
its boundaries move.

    out[j] = x[j + offset] where there is such a place, else a constant

Each rank takes what it holds of the result's own part, and the others send the rest: of `logits[:, :-1]` nothing, of
`labels[:, 1:]` one row per boundary. Backward is the same the other way, and differentiable in its turn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._communication import events
from ..._communication.collectives import exchange
from ..._context.pins import pinned_at
from ..._layouts.layout import Layout
from ..._layouts.mesh import Mesh
from ..._layouts.region import Ranges, cut, divides, intersect, local_offset
from ..._layouts.state import State, sharded
from ..._layouts.strides import memory_order
from ..._tensor.tensor import local_only


class Shift(NamedTuple):
    """Shifts a dim cut as `held` to one cut as `wanted`, both per rank of the axis, in places of the result."""

    mesh: Mesh
    axis: int
    dim: int
    held: tuple[Ranges, ...]
    wanted: tuple[Ranges, ...]
    offset: int
    """Distance from a place of the result to its place in the source."""

    @property
    def back(self) -> Shift:
        return Shift(self.mesh, self.axis, self.dim, self.wanted, self.held, -self.offset)

    def spans(self, source: int, target: int) -> list[tuple[int, int]]:
        """Returns the part of `target` that `source` holds, in places of the source."""
        wanted = tuple((start + self.offset, stop + self.offset) for start, stop in self.wanted[target])
        return intersect(self.held[source], wanted)

    @property
    def moved(self) -> int:
        """Rows that come from another rank, at most, over ranks."""
        ranks = range(len(self.held))
        return max(sum(_length(self.spans(s, t)) for s in ranks if s != t) for t in ranks)


def shift_of(layout: Layout, dim: int, offset: int, length: int) -> tuple[Shift, State] | None:
    """Returns how a slice or pad of a dim keeps a cut, and which: of a dim whose chunks one axis deals out, and of one
    that a plan's context axis cuts in one piece per rank. None for every other cut."""
    axes = layout.axes_of(dim)
    if len(axes) != 1 or not length:
        return None
    mesh, (axis,), state = layout.mesh, axes, layout.states[axes[0]]
    if state.order is None and not (state.in_one_piece and state.units is None and pinned_at(mesh, axis)):
        return None
    count, size = mesh.sizes[axis], layout.shape[dim]
    target = state if divides(state, length) else sharded(dim, order=state.order)
    return Shift(mesh, axis, dim, cut(state, size, count), cut(target, length, count), offset), target


def shifted(shift: Shift, x: Tensor, value: float = 0.0) -> Tensor:
    """This rank's part of the result; `value` where the source has no such place."""
    return _Shifted.apply(x, shift, value)


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, shift: Shift, value: float) -> Tensor:
        ctx.shift, ctx.cause = shift, events.current_cause()
        with local_only():
            return _moved(shift, x, value)

    @staticmethod
    def backward(ctx, grad: Tensor):
        events.restore_cause(ctx.cause)
        if torch.is_grad_enabled():
            return _Shifted.apply(grad, ctx.shift.back, 0.0), None, None
        with local_only():
            return _moved(ctx.shift.back, grad, 0.0), None, None


def _moved(shift: Shift, x: Tensor, value: float) -> Tensor:
    me, count, dim = shift.mesh.coordinate[shift.axis], len(shift.held), shift.dim
    mine, target = shift.held[me], shift.wanted[me]
    sizes, order = _sized(x, dim, _length(target)), memory_order(x.stride(), x.shape)
    if order is None:
        out = x.new_full(sizes, value)
    else:
        out = x.new_full([sizes[d] for d in order], value).permute([order.index(d) for d in range(x.ndim)])

    def put(part: Tensor, spans: list[tuple[int, int]]) -> None:
        at = 0
        for start, stop in spans:
            place = local_offset(target, start - shift.offset)
            out.narrow(dim, place, stop - start).copy_(part.narrow(dim, at, stop - start))
            at += stop - start

    def taken(spans: list[tuple[int, int]]) -> Tensor:
        parts = [x.narrow(dim, local_offset(mine, start), stop - start) for start, stop in spans]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    own = shift.spans(me, me)
    put(taken(own), own)
    if shift.moved:
        nothing = x.narrow(dim, 0, 0)
        sent = [nothing if to == me else taken(shift.spans(me, to)) for to in range(count)]
        come = [[] if of == me else shift.spans(of, me) for of in range(count)]
        shapes = [_sized(x, dim, _length(spans)) for spans in come]
        for part, spans in zip(exchange(sent, shapes, shift.mesh, shift.axis, "shift"), come):
            put(part, spans)
    return out


def _length(spans) -> int:
    return sum(stop - start for start, stop in spans)


def _sized(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])
