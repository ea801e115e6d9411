"""Extrema: amax, amin, aminmax, max, min, argmax, argmin.

    reduced dim whole      local
    reduced dim sharded    every rank's extremum is gathered (one value, and one index, per rank and output
                           element); ties, NaN and empty shards as on one device
    pending input          reduces first

Gradients: amax and the full max share them among all equal elements; max along a dim
gives them to the one that it names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function

from .._tensor import DTensor
from .parts import (
    argument, combined, dims_of, only_split, plain, positions, reduced_layout, reduction, rows, settled, source_of,
    splits, stamped,
)  # fmt: skip
from .pointwise import elementwise
from .registry import Call, Operand, composite, rule


@dataclass(frozen=True, slots=True)
class Side:
    """Largest or smallest: torch's functions, and the value that loses against all others."""

    amax: object
    full: object
    along: object

    def worst(self, dtype: torch.dtype):
        if dtype is torch.bool:
            return self is SMALLEST
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        bounds = (-float("inf"), float("inf")) if dtype.is_floating_point else (info.min, info.max)
        return bounds[self is SMALLEST]


LARGEST = Side(torch.amax, torch.max, torch.max)
SMALLEST = Side(torch.amin, torch.min, torch.min)


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
    x = settled(x, function)
    layout = x._layout.base
    out, axes = reduced_layout(layout, dims, keepdim), splits(layout, dims)
    local = plain(x)
    part = side.full(filled(local, dims, side)) if full else side.amax(filled(local, dims, side), dims, keepdim)
    parts = rows(part, out, axes, function)
    value = side.amax(parts.detach(), 0)
    if not (torch.is_grad_enabled() and parts.requires_grad):
        return stamped(value, out)
    with torch.no_grad():
        counts = rows(_equal(local, part if keepdim or full else _restored(part, dims), full).sum(dims, keepdim), out, axes, function)
        counts = counts * _equal(parts, value, full)
        weights = counts.to(value.dtype) / counts.sum(0)
    return stamped(Shared.apply(parts, weights, value), out)


def _restored(part: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in dims:
        part = part.unsqueeze(dim)
    return part


def _equal(elements: Tensor, value: Tensor, nan: bool) -> Tensor:
    same = elements == value
    return same | (elements.isnan() & value.isnan()) if nan and elements.is_floating_point() else same


@rule(torch.amax, Tensor.amax, torch.amin, Tensor.amin)
def shared_extremum(call: Call):
    if len(call.operands) != 1:
        return None
    (x,) = call.operands
    dims = dims_of(argument(call, 1, "dim", other="axis"), x.ndim)
    keepdim = bool(argument(call, 2, "keepdim", False, other="keepdims"))
    if dims is None or not x.layout.numel:
        return None
    if not only_split(call, dims):
        return reduction(call, dims, keepdim)
    side = side_of(call)
    return composite(lambda *args, **kwargs: extremum(source_of(args, kwargs), dims, keepdim, side, call.function))
