"""Ids of tokens and classes, which name one place of a sharded dim: which of them this rank holds, and where.

A shard may be any ranges of the dim. What indexes several dims at once, or counts from the end, is `rows.py`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._layouts.layout import Layout
from ..._layouts.region import Ranges
from ..._torch_private import _assert_async


def held_ranges(layout: Layout, dim: int) -> Ranges:
    """The global index ranges of `dim` that this rank's shard holds, in local order."""
    return layout.region_at(layout.mesh.coordinate)[dim]


def owned(ids: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Returns, for global `ids`, the local index (0 if it is another rank's), and whether this rank holds it."""
    index, mine, at = torch.zeros_like(ids), None, 0
    for start, stop in ranges:
        inside = (ids >= start) & (ids < stop)
        index = torch.where(inside, ids - (start - at), index)
        mine = inside if mine is None else mine | inside
        at += stop - start
    return index, torch.zeros_like(ids, dtype=torch.bool) if mine is None else mine


def check_range(valid: Tensor, message: str) -> None:
    """An index outside the whole dim is an error on one device, so it must not be silently nobody's.

    `valid` says per index. On an accelerator the check is an assert on the device, which waits for nothing.
    """
    if valid.device.type == "meta":
        return
    if valid.device.type == "cpu":
        if not bool(valid.all()):
            raise IndexError(message)
    else:
        _assert_async(valid.all(), message)


def nothing(tensors, shape: tuple[int, ...]) -> Tensor:
    """Zeros of `shape` that depend on the floating-point `tensors`, with zero gradients.

    The result of a shard without elements: it must be a part of autograd's graph like the
    other ranks' results, because the backward of a conversion is a collective. So give
    the tensors that the function differentiates, and no others.
    """
    zero = None
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            part = tensor.reshape(-1)[:0].sum()
            zero = part if zero is None else zero + part
    return zero.expand(shape).clone()
