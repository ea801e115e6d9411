"""Attention in a ring: every rank keeps its queries, and meets the keys and values of one other rank after the other.

In step t rank r gets the block of rank r - t and sends its own to rank r + t, so that a block travels once to each
rank that needs it, and to no other; while a block is attended, the next is under way. What blocks give is merged by
the log of the sum of exponentials (Liu et al., Ring Attention, arXiv 2310.01889, where blocks go from neighbour to
neighbour: the same bytes, but a block that one rank does not need would have to pass through it all the same).
Backward goes round once more, and sends each block's gradient home, where it is summed in the order of steps.

Cost, of n ranks with causal masks about half: forward (n - 1) blocks of keys and values received, one message each;
backward as many again, and as many gradients of them. Two foreign blocks are held at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from .._communication import events
from .._errors import GradientError
from .._layouts.mesh import Mesh
from .._layouts.region import Ranges
from .._tensor.tensor import local_only
from . import transfer
from .described import Held
from .empty import Seen, Table, blocks_seen
from .kernels import Kernel, Scores, kernel_for
from .sums import Merged, Sum, rows_of
from .tiles import Tile

FORWARD, BACKWARD = "ring", "ring_gradient"


@dataclass(frozen=True, eq=False)
class Circle:
    """A ring: the axis, and the places of rows and of columns that each of its ranks holds."""

    mesh: Mesh
    axis: int
    rows: tuple[Ranges, ...]
    columns: tuple[Ranges, ...]

    @property
    def count(self) -> int:
        return self.mesh.sizes[self.axis]

    @property
    def rank(self) -> int:
        return self.mesh.coordinate[self.axis]

    def width(self, block: int) -> int:
        """Columns of a block."""
        return sum(stop - start for start, stop in self.columns[block])

    def steps(self, seen: Table) -> list[tuple[int | None, int | None]]:
        """Per step after the first: (the block that comes or None, the rank that gets this one's or None)."""
        rank, count, found = self.rank, self.count, []
        for step in range(1, count):
            block, to = (rank - step) % count, (rank + step) % count
            found.append((block if seen[rank][block] else None, to if seen[to][rank] else None))
        return found

    def seen(self, causal: bool, mask: Tensor | Held | None) -> Seen:
        return blocks_seen(self.mesh, self.axis, self.rows, self.columns, causal, mask)


def attend(
    circle: Circle, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | Held | None, noise: Tensor | None,
    causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    """q [..., H, l, E], k [..., H or fewer, s, E], v [..., as k, s, Ev], this rank's parts -> [..., H, l, Ev].

    mask, noise: this rank's rows (or one for all), all columns (or one for all); see `kernels`. A described mask makes
    the part of each tile when it is met.
    """
    seen = circle.seen(causal, mask)
    return _Ring.apply(circle, seen, query, key, value, mask, noise, scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, circle, seen, query, key, value, mask, noise, scale):
        with local_only():
            kernel = kernel_for(query, key, value, mask, noise)
            merged = _forward(kernel, circle, seen, query, key, value, mask, noise, scale)
            out, lse = merged.result(query.dtype)
        ctx.held = mask if isinstance(mask, Held) else None
        ctx.save_for_backward(query, key, value, None if ctx.held is not None else mask, noise, out, lse)
        ctx.all_see = merged.all_see
        ctx.circle, ctx.seen, ctx.kernel, ctx.scale = circle, seen, kernel, scale
        ctx.cause = events.current_cause()
        return out

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            remedies = [('Plan(..., context="gather")', "keys and values are whole: any number of derivatives")]
            rule = "attention in a ring has no second derivative"
            raise GradientError("scaled_dot_product_attention", rule, (), remedies)
        with local_only():
            query, key, value, mask, noise, out, lse = ctx.saved_tensors
            mask = mask if ctx.held is None else ctx.held
            events.restore_cause(ctx.cause)
            needs_mask = isinstance(mask, Tensor) and ctx.needs_input_grad[5]
            grads = _backward(
                ctx.kernel, ctx.circle, ctx.seen, grad, query, key, value, mask, noise, out,
                lse if ctx.all_see else lse.masked_fill(lse == -inf, 0.0), ctx.scale, needs_mask,
            )  # fmt: skip
        return None, None, *grads, None, None


def _forward(
    kernel: Kernel, circle: Circle, seen: Seen, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | Held | None,
    noise: Tensor | None, scale: float,
) -> Merged:  # fmt: skip
    rank = circle.rank
    merged = Merged(query, value, mask is not None)

    def meet(block: int, key: Tensor, value: Tensor) -> None:
        for tile in seen.tiles[block]:
            scores = Scores(_part(mask, tile), _part(noise, tile), tile.triangle, scale)
            part = kernel.forward(
                rows_of(query, tile.rows), rows_of(key, tile.columns), rows_of(value, tile.columns), scores
            )
            merged.add(tile.rows, *part)

    mine = _Blocks(circle, key, value)
    plan = circle.steps(seen.table)
    arriving = mine.begin(plan[0]) if plan else None
    meet(rank, key, value)
    for at, (block, _) in enumerate(plan):
        arrived = arriving
        transfer.wait(arrived.under_way)
        arriving = mine.begin(plan[at + 1]) if at + 1 < len(plan) else None
        if block is not None:
            meet(block, *arrived.tensors)
    return merged


def _backward(
    kernel: Kernel, circle: Circle, seen: Seen, grad: Tensor, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | Held | None, noise: Tensor | None, out: Tensor, lse: Tensor, scale: float, needs_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    rank = circle.rank
    grad_query = Sum(query)
    grad_mask = torch.zeros_like(mask) if needs_mask else None

    def meet(block: int, key: Tensor, value: Tensor) -> tuple[Sum, Sum]:
        """The gradients of the block."""
        sums = Sum(key), Sum(value)
        for tile in seen.tiles[block]:
            scores = Scores(_part(mask, tile), _part(noise, tile), tile.triangle, scale, needs_mask)
            found = kernel.backward(
                rows_of(grad, tile.rows), rows_of(query, tile.rows), rows_of(key, tile.columns),
                rows_of(value, tile.columns), rows_of(out, tile.rows), rows_of(lse, tile.rows, -1),
                scores,
            )  # fmt: skip
            grad_query.add(tile.rows, found[0])
            sums[0].add(tile.columns, found[1])
            sums[1].add(tile.columns, found[2])
            if found[3] is not None:
                _part(grad_mask, tile).add_(found[3])
        return sums

    mine = _Blocks(circle, key, value)
    plan = circle.steps(seen.table)
    arriving = mine.begin(plan[0]) if plan else None
    own = meet(rank, key, value)
    home = None  # the gradients that are under way to whom they belong
    for at, (block, to) in enumerate(plan):
        arrived = arriving
        transfer.wait(arrived.under_way)
        arriving = mine.begin(plan[at + 1], BACKWARD) if at + 1 < len(plan) else None
        theirs = None
        if block is not None:
            theirs = tuple(each.total() for each in meet(block, *arrived.tensors))
        _come_home(home, own)
        home = mine.send_home(block, theirs, to)
    _come_home(home, own)
    return grad_query.total(), own[0].total(), own[1].total(), grad_mask


@dataclass
class _Arrival:
    under_way: transfer.UnderWay | None
    tensors: tuple[Tensor, Tensor] | None


class _Blocks:
    """This rank's keys and values as one message, and the messages of the others."""

    def __init__(self, circle: Circle, key: Tensor, value: Tensor) -> None:
        self._circle, self._key, self._value = circle, key, value
        self._packed: Tensor | None = None
        if circle.count > 1:
            transfer.greet(circle.mesh, circle.axis, key)

    def begin(self, step: tuple[int | None, int | None], kind: str = FORWARD) -> _Arrival:
        """Starts a step: this rank's block goes to one rank, another's comes."""
        block, to = step
        sends = [(to, self._mine())] if to is not None else []
        tensors, buffer = None, None
        if block is not None:
            buffer, tensors = self._buffer(self._circle.width(block))
        receives = [(block, buffer)] if block is not None else []
        return _Arrival(transfer.start(sends, receives, self._circle.mesh, self._circle.axis, kind), tensors)

    def send_home(self, block: int | None, grads: tuple[Tensor, Tensor] | None, to: int | None) -> _Arrival:
        """Starts the gradients of a block to its owner, and receives this rank's from who had its block."""
        sends = [] if block is None else [(block, _packed(*grads))]
        tensors, buffer = None, None
        if to is not None:
            buffer, tensors = self._buffer(self._circle.width(self._circle.rank))
        receives = [(to, buffer)] if to is not None else []
        return _Arrival(transfer.start(sends, receives, self._circle.mesh, self._circle.axis, BACKWARD), tensors)

    def _mine(self) -> Tensor:
        if self._packed is None:
            self._packed = _packed(self._key, self._value)
        return self._packed

    def _buffer(self, width: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Memory for a block of `width` columns, and its keys and values."""
        shapes = [(*tensor.shape[:-2], width, tensor.shape[-1]) for tensor in (self._key, self._value)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        buffer = self._key.new_empty(sum(sizes))
        first, second = buffer.split(sizes)
        return buffer, (first.view(shapes[0]), second.view(shapes[1]))


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """One message of both; each is copied once, whatever its strides."""
    if key.shape == value.shape:
        return torch.stack((key, value)).view(-1)
    buffer = key.new_empty(key.numel() + value.numel())
    for part, tensor in zip(buffer.split((key.numel(), value.numel())), (key, value)):
        part.view(tensor.shape).copy_(tensor)
    return buffer


def _come_home(home: _Arrival | None, own: tuple[Sum, Sum]) -> None:
    if home is None:
        return
    transfer.wait(home.under_way)
    if home.tensors is not None:
        for total, came in zip(own, home.tensors):
            total.add((0, came.shape[-2]), came)


def _part(given: Tensor | Held | None, tile: Tile) -> Tensor | None:
    """A tile's part of a mask or of noise; dims of size 1 are for all."""
    if given is None:
        return None
    if isinstance(given, Held):
        return given.part(tile)
    if given.shape[-1] > 1:
        given = given[..., slice(*tile.places)]
    return given[..., slice(*tile.rows), :] if given.ndim > 1 and given.shape[-2] > 1 else given
