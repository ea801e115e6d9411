"""Extrema: amax, amin, aminmax, max, min, argmax, argmin.

    reduced dim whole      local
    reduced dim sharded    every rank's extremum is gathered (one value, and one index, per rank and output
                           element); ties, NaN and empty shards as on one device
    partial input          reduces first

Gradients: amax and the full max share them among all equal elements; max along a dim
gives them to the one that it names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function

from ..._tensor.tensor import DTensor
from ..elements.pointwise import elementwise
from ..registry import Call, rule
from ..solvers.parts import (
    argument,
    attached,
    dims_and_keepdim,
    plain,
    positions,
    reduced,
    reduced_layout,
    reducing,
    rows,
    splits,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """Largest or smallest: torch's functions (`pick` of a tensor, or of one and a dim), and who loses to all."""

    amax: Callable
    pick: Callable

    def worst(self, dtype: torch.dtype):
        if dtype is torch.bool:
            return self is SMALLEST
        if dtype.is_floating_point:
            return float("inf") if self is SMALLEST else -float("inf")
        return torch.iinfo(dtype).max if self is SMALLEST else torch.iinfo(dtype).min


LARGEST = Side(torch.amax, torch.max)
SMALLEST = Side(torch.amin, torch.min)


def side_of(call: Call) -> Side:
    return LARGEST if "max" in call.name else SMALLEST


class Shared(Function):
    """rows [n, ...], weights of them, value -> value; its gradient goes to the rows by weight."""

    @staticmethod
    def forward(ctx, parts: Tensor, weights: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (weights,) = ctx.saved_tensors
        return grad * weights, None, None


def filled(local: Tensor, dims: tuple[int, ...], side: Side) -> Tensor:
    """`local`, with one element that loses against all others where a reduced dim is empty. Stays in the graph."""
    for dim in dims:
        if local.shape[dim] == 0:
            shape = [*local.shape]
            shape[dim] = 1
            local = torch.cat([local, local.new_full(shape, side.worst(local.dtype))], dim)
    return local


def extremum(x: DTensor, dims: tuple[int, ...], keepdim: bool, side: Side, function, *, full: bool = False) -> DTensor:
    """The extremum over dims of which some are sharded. `full`: max(x), whose gradient treats NaN as equal to NaN."""
    x = reduced(x, function)
    layout = x._layout.base
    out, axes = reduced_layout(layout, dims, keepdim), splits(layout, dims)
    local = plain(x)
    candidates = filled(local, dims, side)
    part = side.pick(candidates) if full else side.amax(candidates, dims, keepdim)
    parts = rows(part, out, axes, function)
    value = side.amax(parts.detach(), 0)
    if not (torch.is_grad_enabled() and parts.requires_grad):
        return attached(value, out)
    with torch.no_grad():
        ties = _equal(local, part if keepdim or full else _restored(part, dims), full).sum(dims, keepdim)
        counts = rows(ties, out, axes, function) * _equal(parts, value, full)
        weights = counts.to(value.dtype) / counts.sum(0)
    return attached(Shared.apply(parts, weights, value), out)


def _restored(part: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in dims:
        part = part.unsqueeze(dim)
    return part


def _equal(elements: Tensor, value: Tensor, nan: bool) -> Tensor:
    same = elements == value
    return same | (elements.isnan() & value.isnan()) if nan and elements.is_floating_point() else same


def first_extreme(x: DTensor, dim: int, keepdim: bool, side: Side, function) -> tuple[DTensor, DTensor]:
    """(values, indices) along a sharded dim: of equal values, the one with the lowest index; NaN beats all."""
    x = reduced(x, function)
    layout = x._layout.base
    axes, kept = splits(layout, (dim,)), reduced_layout(layout, (dim,), True)
    values, at = side.pick(filled(plain(x), (dim,), side), dim, keepdim=True)
    none = torch.full((1,), layout.shape[dim], device=at.device)  # the index of what `filled` put in
    parts = rows(values, kept, axes, function)
    indices = rows(torch.cat([positions(layout, dim, at.device), none])[at], kept, axes, function)
    value, index = first_row(parts, indices, layout.shape[dim], side)
    if not keepdim:
        value, index = value.squeeze(dim), index.squeeze(dim)
    out = reduced_layout(layout, (dim,), keepdim)
    return attached(value, out), attached(index, out)


def first_row(parts: Tensor, indices: Tensor, none: int, side: Side) -> tuple[Tensor, Tensor]:
    """Returns the extreme value with the lowest index, from rows of (value, index)."""
    extreme = _equal(parts, side.amax(parts.detach(), 0), True)
    index, row = torch.where(extreme, indices, none).min(0, keepdim=True)
    return parts.gather(0, row).squeeze(0), index.squeeze(0)


def first_of_all(x: DTensor, keepdim: bool, side: Side, function) -> DTensor:
    """The index of the extreme element of the flattened tensor."""
    x = reduced(x.detach(), function)
    layout = x._layout.base
    dims = tuple(range(layout.ndim))
    out = reduced_layout(layout, dims, keepdim)
    local = filled(plain(x), dims, side)
    value, at = side.pick(local.reshape(-1), 0)
    index, stride, rest = torch.zeros_like(at), 1, at
    for dim in reversed(dims):
        held = positions(layout, dim, at.device)
        if not len(held):
            index = torch.full_like(at, layout.numel)  # an empty shard has no index to offer
            break
        index = index + held[rest % local.shape[dim]] * stride
        stride, rest = stride * layout.shape[dim], rest // local.shape[dim]
    axes, scalar = splits(layout, dims), reduced_layout(layout, dims, False)
    parts, indices = rows(value, scalar, axes, function), rows(index, scalar, axes, function)
    return attached(first_row(parts, indices, layout.numel, side)[1].reshape(out.shape), out)


# --- rules --------------------------------------------------------------------------


def _arguments(call: Call):
    """(dims, keepdim) of f(input, dim, keepdim), or None; also where there is no element to choose from."""
    return dims_and_keepdim(call) if call.operands and call.operands[0].layout.numel else None


@rule(torch.amax, Tensor.amax, torch.amin, Tensor.amin)
def shared_extremum(call: Call):
    found = _arguments(call)
    if found is None:
        return None
    side = side_of(call)
    return reducing(call, *found, lambda x: extremum(x, *found, side, call.function))


@rule(torch.aminmax, Tensor.aminmax)
def aminmax(call: Call):
    """(dim and keepdim are keywords only.)"""
    found = _arguments(call)
    if found is None:
        return None

    def run(x: DTensor):
        x = reduced(x, call.function)
        return torch.return_types.aminmax([extremum(x, *found, side, call.function) for side in (SMALLEST, LARGEST)])

    return reducing(call, *found, run, outputs=2)


@rule(torch.max, Tensor.max, torch.min, Tensor.min)
def extreme(call: Call):
    """Extremum of two tensors elementwise; of all elements; or along a dim, with indices."""
    if len(call.operands) == 2:
        return elementwise(call)
    found = _arguments(call)
    if found is None:
        return None
    dims, keepdim = found
    side = side_of(call)
    if argument(call, 1, "dim", other="axis") is None:
        return reducing(call, dims, keepdim, lambda x: extremum(x, dims, False, side, call.function, full=True))
    pair = torch.return_types.max if side is LARGEST else torch.return_types.min
    run = lambda x: pair(first_extreme(x, dims[0], keepdim, side, call.function))
    return reducing(call, dims, keepdim, run, outputs=2)


@rule(torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin)
def index_of_extreme(call: Call):
    found = _arguments(call)
    if found is None:
        return None
    dims, keepdim = found
    side = side_of(call)
    if argument(call, 1, "dim", other="axis") is None:
        return reducing(call, dims, keepdim, lambda x: first_of_all(x, keepdim, side, call.function))
    run = lambda x: first_extreme(x.detach(), dims[0], keepdim, side, call.function)[1]
    return reducing(call, dims, keepdim, run)
