"""Contractions in blocks: every block of the grid is one entry of a batched product, summed over the tree.

A product is told by labels, as in an einsum of two operands:

    batch      in both and in the result: every index is an entry of its own
    rows       in the left operand and the result: cut into blocks
    columns    in the right operand and the result: cut into blocks
    summed     in both: cut into blocks, whose products are summed over the tree

    linear     b t k, n k -> b t n         its gradients   b t n, n k -> b t k   and   b t n, b t k -> n k

A block's product is computed in float32 for half precision, and always on fresh, contiguous operands of one shape:
on CPU the bits of an entry of `torch.bmm` depend neither on how many entries there are nor on where they lie
(`vescale.check_premise` asks this of the machine at hand).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .tree import kept_on_first, tree_sum, unseen, wide


class Labels(NamedTuple):
    """The dims of the two operands and of the result."""

    left: tuple
    right: tuple
    out: tuple


def contract(a: Tensor, b: Tensor, labels: Labels, cuts: Mapping) -> Tensor:
    """The product of two local tensors; a summed label that is sharded leaves it on the first rank of its axes."""
    dtype, a, b = a.dtype, wide(a), wide(b)
    batch = [x for x in labels.out if x in labels.left and x in labels.right]
    rows = [x for x in labels.out if x in labels.left and x not in labels.right]
    columns = [x for x in labels.out if x in labels.right and x not in labels.left]
    summed = [x for x in labels.left if x in labels.right and x not in labels.out]
    sizes = {x: n for names, t in ((labels.left, a), (labels.right, b)) for x, n in zip(names, t.shape)}
    a = _blocked(a, labels.left, batch, rows, summed, cuts)
    b = _blocked(b, labels.right, batch, columns, summed, cuts)
    # [batch, row blocks, column blocks, summed blocks, rows, summed] @ [the same, summed, columns]
    entries = (a.shape[0], a.shape[1], b.shape[1], a.shape[2])
    a = a.unsqueeze(2).expand(*entries, *a.shape[-2:])
    b = b.transpose(-2, -1).unsqueeze(1).expand(*entries, b.shape[-1], b.shape[-2])
    out = torch.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))
    out = out.view(*entries[:3], *[len(cuts[x].held) for x in summed], *out.shape[-2:])
    for at in reversed(range(len(summed))):
        out = tree_sum(out, 3 + at, cuts[summed[at]])
    out = out.reshape(
        *[sizes[x] for x in batch], *[len(cuts[x].held) for x in (*rows, *columns)],
        *[cuts[x].size for x in (*rows, *columns)],
    )  # fmt: skip
    many = len(rows) + len(columns)
    place = {x: (d,) for d, x in enumerate(batch)}
    place |= {x: (len(batch) + d, len(batch) + many + d) for d, x in enumerate((*rows, *columns))}
    out = out.permute(*[d for x in labels.out for d in place[x]]).reshape([sizes[x] for x in labels.out])
    return kept_on_first(out if out.dtype is dtype else out.to(dtype), [cuts[x] for x in summed])


def _blocked(x: Tensor, names: tuple, batch: list, kept: list, summed: list, cuts: Mapping) -> Tensor:
    """[batch indices, kept blocks, summed blocks, kept indices, summed indices], contiguous as far as it can be."""
    shape, place = [], {}
    for name, size in zip(names, x.shape):
        if name in batch:
            place[name] = (len(shape),)
            shape.append(size)
        else:
            place[name] = (len(shape), len(shape) + 1)
            shape += cuts[name].local
    order = [place[name][0] for name in (*batch, *kept, *summed)] + [place[name][1] for name in (*kept, *summed)]
    x = x.reshape(shape).permute(order)
    many = [len(batch), len(kept), len(summed), len(kept), len(summed)]
    sizes, at = [], 0
    for count in many:
        size = 1
        for n in x.shape[at : at + count]:
            size *= n
        sizes.append(size)
        at += count
    return x.reshape(sizes)


class Product(Function):
    """`contract`, and its two gradients by the same."""

    @staticmethod
    @unseen
    def forward(ctx, a: Tensor, b: Tensor, labels: Labels, cuts: Mapping) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.labels, ctx.cuts = labels, cuts
        return contract(a, b, labels, cuts)

    @staticmethod
    @once_differentiable
    @unseen
    def backward(ctx, grad: Tensor):
        (a, b), (left, right, out), cuts = ctx.saved_tensors, ctx.labels, ctx.cuts
        of_a = contract(grad, b, Labels(out, right, left), cuts) if ctx.needs_input_grad[0] else None
        of_b = contract(grad, a, Labels(out, left, right), cuts) if ctx.needs_input_grad[1] else None
        return of_a, of_b, None, None
