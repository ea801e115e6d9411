"""Attention over whole sequences of some heads: an all-to-all turns parts of the sequence into parts of the heads, and
another turns the result back (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509).

Where the ranks are more than the heads of keys and values, or do not divide them, these are repeated to the least
number that divides, at most to one for each query head. Heads that are local already (another axis has cut them) are
cut once more.

Cost, of n ranks: forward four all-to-alls of (n - 1)/n of a part of q, k, v and the result, q, k and v in one
message; backward the same. Each rank holds whole sequences of 1/n of its heads.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import torch
from torch import Tensor

from .._communication import events
from .._communication.collectives import exchange
from .._layouts.region import Ranges
from .._tensor.tensor import local_only
from .ring import Circle

TO_HEADS, TO_SEQUENCE = "heads_to_sequence", "sequence_to_heads"


def kv_heads(query_heads: int, key_heads: int, ranks: int) -> int | None:
    """Returns as how many heads keys and values travel; None if the queries' do not divide by the ranks."""
    if query_heads % ranks:
        return None
    least = lcm(key_heads, ranks)
    return least if query_heads % least == 0 else query_heads


def attend(circle: Circle, query: Tensor, key: Tensor, value: Tensor, kernel: Callable[..., Tensor]) -> Tensor:
    """Attends as in a ring; `kernel(q, k, v, heads)` attends whole sequences of the local query heads [heads.start,
    heads.stop) of those that the ranks of the axis share."""
    count, rank = circle.count, circle.rank
    heads = query.shape[-3]
    wanted = kv_heads(heads, key.shape[-3], count)
    repeats = wanted // key.shape[-3]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    query, key, value = _Swap.apply(circle, (circle.rows, circle.columns, circle.columns), True, query, key, value)
    each = heads // count
    out = kernel(query, key, value, range(rank * each, (rank + 1) * each))
    return _Swap.apply(circle, (circle.rows,), False, out)[0]


class _Swap(torch.autograd.Function):
    """Between parts of the sequence (dim -2) of all heads (dim -3) and the whole sequence of some of the heads."""

    @staticmethod
    def forward(ctx, circle: Circle, places: tuple[tuple[Ranges, ...], ...], to_heads: bool, *tensors: Tensor):
        ctx.circle, ctx.places, ctx.to_heads, ctx.cause = circle, places, to_heads, events.current_cause()
        with local_only():
            return _swapped(circle, places, to_heads, tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        events.restore_cause(ctx.cause)
        if torch.is_grad_enabled():
            return None, None, None, *_Swap.apply(ctx.circle, ctx.places, not ctx.to_heads, *grads)
        with local_only():
            return None, None, None, *_swapped(ctx.circle, ctx.places, not ctx.to_heads, grads)


def _swapped(circle: Circle, places: tuple[tuple[Ranges, ...], ...], to_heads: bool, tensors: tuple[Tensor, ...]):
    """All tensors in one all-to-all."""
    count, rank = circle.count, circle.rank
    pieces: list[list[Tensor]] = [[] for _ in range(count)]  # per rank, of each tensor
    shapes: list[list[tuple[int, ...]]] = [[] for _ in range(count)]
    for tensor, ranges in zip(tensors, places):
        widths = [sum(stop - start for start, stop in held) for held in ranges]
        if to_heads:
            parts = tensor.chunk(count, -3)
            heads = tensor.shape[-3] // count
            come = [(*tensor.shape[:-3], heads, width, tensor.shape[-1]) for width in widths]
        else:
            parts = [_taken(tensor, held) for held in ranges]
            come = [(*tensor.shape[:-2], widths[rank], tensor.shape[-1])] * count
        for to in range(count):
            pieces[to].append(parts[to].reshape(-1))
            shapes[to].append(come[to])
    sizes = [[torch.Size(shape).numel() for shape in each] for each in shapes]
    kind = TO_HEADS if to_heads else TO_SEQUENCE
    came = exchange(
        [torch.cat(each) for each in pieces], [(sum(each),) for each in sizes], circle.mesh, circle.axis, kind
    )
    split = [flat.split(each) for flat, each in zip(came, sizes)]
    found = []
    for at, ranges in enumerate(places):
        parts = [split[of][at].view(shapes[of][at]) for of in range(count)]
        found.append(_assembled(parts, ranges) if to_heads else torch.cat(parts, -3))
    return tuple(found)


def _taken(tensor: Tensor, ranges: Ranges) -> Tensor:
    return torch.cat([tensor[..., start:stop, :] for start, stop in ranges], -2)


def _assembled(parts: list[Tensor], places: tuple[Ranges, ...]) -> Tensor:
    """The whole sequence from every rank's part."""
    spans = []
    for part, ranges in zip(parts, places):
        at = 0
        for start, stop in ranges:
            spans.append((start, part[..., at : at + stop - start, :]))
            at += stop - start
    return torch.cat([piece for _, piece in sorted(spans, key=lambda span: span[0])], -2)
