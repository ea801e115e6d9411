"""Contractions in blocks: every block of the grid is one entry of a batched product, summed over the tree.

A product is told by labels, as in an einsum of two operands:

    batch      in both and in the result: every index is an entry of its own
    rows       in the left operand and the result: cut into blocks
    columns    in the right operand and the result: cut into blocks
    summed     in both: cut into blocks, whose products are summed over the tree

    linear     b t k, n k -> b t n         its gradients   b t n, n k -> b t k   and   b t n, b t k -> n k

A block's product is computed in float32 for half precision, and always on contiguous operands of one shape that begin
at a cache line: on CPU the bits of an entry of `torch.bmm` then depend neither on how many entries there are nor on
which of them it is (`merging.batched`; `vescale.check_premise` asks this of the machine at hand). Where the machine
gives all blocks of rows and columns the same bits in one product (`merges`), it is one: an entry per summed block is
left.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from math import prod
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..grid import Cut
from ..merging import batched, begun_alike, lines, merges
from ..tree import kept_on_first, tree_sum, unseen, unseen_backward, wide


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
    counts = [prod(len(cuts[x].held) for x in names) for names in (rows, columns)]
    if merges(a, *counts, tuple(prod(cuts[x].size for x in names) for names in (rows, summed, columns))):
        cuts = {**cuts, **{x: Cut(1, sizes[x], (0,)) for x in (*rows, *columns)}}
    a = _blocked(a, labels.left, batch, rows, summed, cuts)
    b = _blocked(b, labels.right, batch, columns, summed, cuts)
    out = _products(a, b)
    out = out.view(*out.shape[:3], *[len(cuts[x].held) for x in summed], *out.shape[-2:])
    for at in reversed(range(len(summed))):
        out = tree_sum(out, 3 + at, cuts[summed[at]], in_place=True)
    for dim, parts in reversed(list(enumerate((
        [sizes[x] for x in batch], [len(cuts[x].held) for x in rows], [len(cuts[x].held) for x in columns],
        [cuts[x].size for x in rows], [cuts[x].size for x in columns],
    )))):  # fmt: skip
        out = out.unflatten(dim, parts) if parts else out.squeeze(dim)
    many = len(rows) + len(columns)
    place = {x: (d,) for d, x in enumerate(batch)}
    place |= {x: (len(batch) + d, len(batch) + many + d) for d, x in enumerate((*rows, *columns))}
    # Another memory than the scratch, whatever the order of the dims.
    out = out.permute(*[d for x in labels.out for d in place[x]]).clone(memory_format=torch.contiguous_format)
    out = out.view([sizes[x] for x in labels.out])
    return kept_on_first(out if out.dtype is dtype else out.to(dtype), [cuts[x] for x in summed])


def _products(a: Tensor, b: Tensor) -> Tensor:
    """[batch, row blocks, summed blocks, m, k] and [batch, column blocks, summed blocks, n, k] to
    [batch, row blocks, column blocks, summed blocks, m, n].

    One batched product per block of rows, or of columns: of the operand that is repeated for all blocks of the other
    only a part is ever copied, into memory that is used again. The result is such memory: it is the caller's until the
    next call.
    """
    (entries, rows, summed, m, k), columns, n = a.shape, b.shape[1], b.shape[3]
    by_rows = a.numel() * columns <= b.numel() * rows
    outer, inner = (rows, columns) if by_rows else (columns, rows)
    out = _scratch("out", (outer, entries, inner, summed, m, n), a)
    copy = None
    if inner > 1:
        memory, each = partial(_scratch, "copy", like=a), (m, k) if by_rows else (n, k)
        copy = lines(memory, (entries, inner, summed), each, a.element_size())
    for at in range(outer):
        one, other = (a[:, at], b) if by_rows else (b[:, at], a)
        one = one.unsqueeze(1)
        if copy is not None:
            one = copy.copy_(one.expand(copy.shape))
        left, right = (one, other) if by_rows else (other, one)
        batched(left.reshape(-1, m, k), right.reshape(-1, n, k), out[at].view(-1, m, n))
    return out.movedim(0, 1) if by_rows else out.movedim(0, 2)


_memory: dict[tuple, Tensor] = {}


def _scratch(use: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory that every call uses again, one per use, dtype, device and thread: fresh pages cost more than sums."""
    key = (use, like.dtype, like.device, get_ident())
    size = prod(shape)
    held = _memory.get(key)
    if held is None or held.numel() < size:
        held = _memory[key] = like.new_empty(size)
    return held[:size].view(shape)


def _blocked(x: Tensor, names: tuple, batch: list, kept: list, summed: list, cuts: Mapping) -> Tensor:
    """[batch indices, kept blocks, summed blocks, kept indices, summed indices], every block begun alike."""
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
    ends = list(accumulate(many))
    sizes = [prod(x.shape[end - count : end]) for end, count in zip(ends, many)]
    return begun_alike(x.reshape(sizes))


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
    @unseen_backward
    def backward(ctx, saved, grad: Tensor):
        (a, b), (left, right, out), cuts = saved, ctx.labels, ctx.cuts
        of_a = contract(grad, b, Labels(out, right, left), cuts) if ctx.needs_input_grad[0] else None
        of_b = contract(grad, a, Labels(out, left, right), cuts) if ctx.needs_input_grad[1] else None
        return of_a, of_b, None, None
