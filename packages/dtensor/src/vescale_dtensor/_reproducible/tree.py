r"""Sums over a fixed tree: within a block by halves, over blocks in pairs of neighbours, then over ranks.

    block     0   1   2   3   4   5   6   7          rank 0 holds 0..3, rank 1 holds 4..7
               \ /     \ /     \ /     \ /
                0       1       2       3            every rank by itself
                 \     /         \     /
                    0               1                all-gathered: subtree sums, here one per rank
                     \             /
                           sum                       every rank, in the same order

All additions are additions of two tensors, element by element, which round alike in every kernel; so no sum
depends on how a kernel walks through its input. Half precision is added up in float32 and rounded once. What is
left of a count of blocks when its factors of two are used up (3) is added from left to right.

The result is complete on every rank. Where a layout calls it partial (P) it is kept on the axis's first rank, and
the others hold -0.0, the number that changes no sum: so whatever a later conversion adds up, it adds one
contribution, and no order is left to choose. This holds for every partial tensor while the mode is on, also where the
rank is another one (rows of a split table, a slice of a sharded dim): what would add two contributions takes reduced
operands (`call.solved`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .._communication.collectives import all_gather
from .._torch_private import DisableTorchFunction
from .grid import Cut

_HALF = (torch.bfloat16, torch.float16)


def unseen(body: Callable) -> Callable:
    """A Function's body, which the mode on plain tensors is not to look at: it is a form already."""

    @functools.wraps(body)
    def run(*args):
        with DisableTorchFunction():
            return body(*args)

    return run


def unseen_backward(body: Callable) -> Callable:
    """Likewise the backward `body(ctx, saved, grad)`. What was saved is asked for before, with the mode in sight: a
    checkpoint then computes it again, as it was computed first."""

    @functools.wraps(body)
    def run(ctx, grad):
        saved = ctx.saved_tensors
        with DisableTorchFunction():
            return body(ctx, saved, grad)

    return run


def wide(x: Tensor) -> Tensor:
    """Widens a sum's terms: float32 for half precision."""
    return x.float() if x.dtype in _HALF else x


def folded(x: Tensor, dim: int) -> Tensor:
    """The sum over one dim, by halves; the dim is gone. An odd one out waits for the next round."""
    n = x.shape[dim]
    while n > 1:
        half = n // 2
        pairs = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat([pairs, x.narrow(dim, n - 1, 1)], dim) if n % 2 else pairs
        n = half + n % 2
    return x.squeeze(dim) if n else x.sum(dim)


def tree_sum(x: Tensor, dim: int, cut: Cut, *, in_place: bool = False) -> Tensor:
    """The sum over the dim of blocks `dim`, complete on every rank of `cut.axes`; the dim is gone.

    in_place: `x` may be written to, and the result is a part of it or fresh.

    Cost: an all-gather of the subtree sums over the axes that shard the dim.
    """
    levels, left, order = cut.levels
    for _ in range(levels):
        x = _paired(x, dim, in_place)
    if cut.axes:
        rows = x.movedim(dim, 0).contiguous()
        rows = all_gather(rows, cut.mesh, cut.axes).flatten(0, 1)
        x, dim = rows, 0
        if order != tuple(range(left)):
            x = rows.index_select(0, torch.tensor(order, device=rows.device))
    while left % 2 == 0:
        x, left = _paired(x, dim, in_place), left // 2
    total = x.select(dim, 0)
    for n in range(1, left):
        total = total + x.select(dim, n)
    return total


def _paired(x: Tensor, dim: int, in_place: bool) -> Tensor:
    """Neighbours along `dim` added up."""
    first, second = x.unfold(dim, 2, 2).unbind(-1)
    return first.add_(second) if in_place else first + second


def canonical_sum(x: Tensor, dims: Sequence[int], cuts: Sequence[Cut]) -> Tensor:
    """The sum over `dims`, gone afterwards, the last dim first; kept on the first rank of the axes that shard them."""
    dtype, x = x.dtype, wide(x)
    for dim, cut in sorted(zip(dims, cuts), key=lambda pair: -pair[0]):
        x = tree_sum(folded(x.unflatten(dim, cut.local), dim + 1), dim, cut)
    return kept_on_first(x if x.dtype is dtype else x.to(dtype), cuts)


def kept_on_first(x: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """`x` on the first rank of every axis that shards one of the cuts; -0.0 elsewhere."""
    if any(cut.mesh.coordinate[axis] for cut in cuts for axis in cut.axes):
        return torch.full_like(x, -0.0 if x.is_floating_point() else 0, memory_format=torch.contiguous_format)
    return x


class Total(Function):
    """[..., dim, ...] -> its sum over `dims`. The gradient is spread out again."""

    @staticmethod
    @unseen
    def forward(ctx, x: Tensor, dims: tuple[int, ...], cuts: tuple[Cut, ...]) -> Tensor:
        ctx.shape, ctx.dims = x.shape, dims
        return canonical_sum(x, dims, cuts).contiguous()

    @staticmethod
    @once_differentiable
    @unseen
    def backward(ctx, grad: Tensor):
        for dim in sorted(ctx.dims):
            grad = grad.unsqueeze(dim)
        return grad.expand(ctx.shape), None, None


class Spread(Function):
    """A tensor expanded to `shape` over `dims`, which it lacks; the gradient is their canonical sum."""

    @staticmethod
    @unseen
    def forward(ctx, x: Tensor, shape: tuple[int, ...], dims: tuple[int, ...], cuts: tuple[Cut, ...]) -> Tensor:
        ctx.dims, ctx.cuts = dims, cuts
        for dim in dims:
            x = x.unsqueeze(dim)
        return x.expand(shape)

    @staticmethod
    @once_differentiable
    @unseen
    def backward(ctx, grad: Tensor):
        return canonical_sum(grad, ctx.dims, ctx.cuts).contiguous(), None, None, None
