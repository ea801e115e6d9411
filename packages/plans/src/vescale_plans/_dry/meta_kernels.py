"""Operators that torch refuses where a dry run needs them: on meta tensors, or on real integers that stand beside them.

grouped products   `vescale_trace.meter`'s own shape function
what is received   integers are real, and nobody sends any: they are 0, a place that every table has
histograms         code that asks a tensor for its device finds "meta", and casts as for a GPU: a CPU counts no int32
counts             how many there are depends on the largest value, and torch gives no shape: where code says how many
                   it wants at least, values (experts, labels) are taken to be below that

And what stands for a choice by values (`CHOICES`): indices that are real, each as often as any, so that code that goes
on by them (experts that are called one by one, each with its rows) runs, with an even load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_trace.meter import ON_META
from vescale_trace.values import tensors_in

aten = torch.ops.aten


def _histc(values: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    if values.is_meta or values.is_floating_point():
        return aten.histc.default(values, bins, min, max)
    return aten.histc.default(values.double(), bins, min, max).to(values.dtype)


def _bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if not values.is_meta or not minlength:
        return aten.bincount.default(values, weights, minlength)
    if weights is None:
        return values.new_empty(minlength, dtype=torch.int64)
    return values.new_empty(minlength, dtype=torch.float32 if weights.dtype is torch.float32 else torch.float64)


def _evenly(shape: torch.Size, dim: int, choices: int) -> Tensor:
    """Indices of `shape` below `choices`: along `dim` all differ, and in all each is there as often as any."""
    dim %= max(len(shape), 1)
    if not shape:
        return torch.zeros((), dtype=torch.int64)
    others = torch.arange(math.prod(shape) // max(shape[dim], 1)).view([n for at, n in enumerate(shape) if at != dim])
    along = torch.arange(shape[dim]).view([-1 if at == dim else 1 for at in range(len(shape))])
    return (others.unsqueeze(dim) * shape[dim] + along) % choices


def _topk(values: Tensor, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> tuple[Tensor, Tensor]:
    found, indices = aten.topk.default(values, k, dim, largest, in_order)
    return found, _evenly(indices.shape, dim, values.shape[dim]) if values.is_meta and values.ndim else indices


def _argmax(values: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    found = aten.argmax.default(values, dim, keepdim)
    if not values.is_meta or dim is None:
        return found
    kept = aten.argmax.default(values, dim, True)
    return _evenly(kept.shape, dim, values.shape[dim]).view(found.shape)


def _max(values: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    found, indices = aten.max.dim(values, dim, keepdim)
    return found, _argmax(values, dim, keepdim) if values.is_meta else indices


def received(function: Callable) -> Callable:
    """Wraps a collective that fills its first argument, which torch's fake group leaves as it was. It is emptied
    before, because a real group may still be filling it when the call returns."""

    def filled(out: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in tensors_in(out):
            if not tensor.is_meta:
                tensor.zero_()
        return function(out, *args, **kwargs)

    return filled


CHOICES: dict[Any, Callable] = {aten.topk.default: _topk, aten.argmax.default: _argmax, aten.max.dim: _max}
STAND_INS: dict[Any, Callable] = {**ON_META, aten.histc.default: _histc, aten.bincount.default: _bincount}
c10d = torch.ops.c10d
for _collective in (c10d.alltoall_base_, c10d.alltoall_, c10d.recv_):
    STAND_INS[_collective.default] = received(_collective.default)
