"""Rows to the ranks that hold their experts, and back: one all-to-all each way of exactly the rows that move.

    rank 0, experts 0 1      rank 1, experts 2 3          rows sorted by expert, a: from rank 0, b: from rank 1
    a0 a0 a2 a3          ->  b0 b1 b2 b3           sent
    a0 a0 b0 b1              a2 a3 b2 b3           arrived: by rank of origin, then by expert

One small all-to-all of counts goes ahead, the only time the host waits for the device.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from vescale_dtensor.debug import Cause
from vescale_dtensor.engine import Mesh, RowsInFlight, fold_objects, gather_objects, set_cause

from .capacity import counted, positions


class Spread:
    """Assigns experts to the ranks of an axis, as torch.chunk cuts them; `ranks` is 1 if each holds all."""

    def __init__(self, name: str, mesh: Mesh, axis: int, experts: int, spread: bool = True) -> None:
        self.name, self.mesh, self.axis, self.experts = name, mesh, axis, experts
        self.ranks = mesh.sizes[axis] if spread else 1
        chunk = -(-experts // self.ranks)
        self.held = [max(min((rank + 1) * chunk, experts) - rank * chunk, 0) for rank in range(self.ranks)]
        self.mine = mesh.coordinate[axis] if spread else 0
        self.local, self.first = self.held[self.mine], sum(self.held[: self.mine])


def of_any_rank(names: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """The names that any rank says, on all of them. Cost: a small all-gather."""
    return fold_objects(names, lambda said: tuple(dict.fromkeys(chain.from_iterable(said))), mesh)


def total_load(experts: Spread, load: list[int] | Tensor, replicas: tuple[int, ...]) -> list[int]:
    """The sum of what ranks counted for the experts they hold; along `replicas` they counted the same rows."""
    totals, here = [0] * experts.experts, load.tolist() if isinstance(load, Tensor) else load
    for coordinate, counts in gather_objects((experts.mesh.coordinate, here), experts.mesh):
        if not any(coordinate[axis] for axis in replicas):
            first = sum(experts.held[: coordinate[experts.axis]]) if len(counts) < experts.experts else 0
            for i, count in enumerate(counts):
                totals[first + i] += count
    return totals


class Route:
    """Routes rows to ranks: a stable sort of the chosen experts, and the counts that ranks exchange.

    Arguments:
        indices: the expert of every row, int64.
        capacity: per expert, how many of this rank's rows it takes, the first ones; the others stay, and zeros come
            back for them. None for all.

    Cost: an all-to-all of 8 bytes per expert.
    """

    def __init__(self, spread: Spread, indices: Tensor, capacity: Tensor | None = None) -> None:
        self.spread = spread
        dry = indices.is_meta
        flat = torch.arange(indices.numel()) % spread.experts if dry else indices.reshape(-1)  # dry: an even load
        self.order = torch.argsort(flat, stable=True)
        counts = counted(flat, spread.experts)
        self.dropped = torch.zeros_like(counts)
        self._drops = capacity is not None and not dry
        if self._drops:
            by_expert = flat[self.order]
            stays = positions(by_expert) >= capacity[by_expert]
            self.order = self.order[torch.argsort(stays, stable=True)]  # those that stay come last
            self.dropped, counts = counts, torch.minimum(counts, capacity)
            self.dropped = self.dropped - counts
        self.back = torch.empty_like(self.order)
        self.back[self.order] = torch.arange(flat.numel(), device=flat.device)
        set_cause(Cause("expert counts", spread.name))
        sizes = (spread.held, [spread.local] * spread.ranks)
        arrived = RowsInFlight(counts, *sizes, spread.mesh, spread.axis).wait()
        if dry:
            arrived = counts.split(spread.held)[spread.mine].repeat(spread.ranks)
        self.arrived = arrived.view(spread.ranks, spread.local)
        sent = torch.stack([part.sum() for part in counts.split(spread.held)])
        numbers = torch.cat([sent, self.arrived.sum(1), self.arrived.sum(0)]).tolist()  # the one wait
        ranks = spread.ranks
        self.sends, self.receives, self.load = numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :]
        if self._drops:
            travel = sum(self.sends)
            self.order, self.back = self.order[:travel], self.back.clamp(max=travel)
        self._under_way: RowsInFlight | None = None

    def arrived_ids(self) -> Tensor:
        """The local expert of every row that arrived: by rank of origin, then by expert."""
        experts = torch.arange(self.spread.local, device=self.arrived.device).repeat(self.spread.ranks)
        return torch.repeat_interleave(experts, self.arrived.view(-1), output_size=sum(self.receives))

    def begin(self, copies: Tensor) -> None:
        """Starts what `Travel` out will wait for: compute between the two goes on meanwhile."""
        self._under_way = self._send(copies, "forward")

    def out(self, copies: Tensor, direction: str) -> Tensor:
        under_way, self._under_way = self._under_way, None
        return (under_way or self._send(copies, direction)).wait()

    def _send(self, copies: Tensor, direction: str) -> RowsInFlight:
        set_cause(Cause("expert dispatch", self.spread.name, direction=direction))
        rows = copies.index_select(0, self.order)
        return RowsInFlight(rows, self.sends, self.receives, self.spread.mesh, self.spread.axis)

    def returned(self, rows: Tensor, direction: str) -> Tensor:
        set_cause(Cause("expert combine", self.spread.name, direction=direction))
        back = RowsInFlight(rows, self.receives, self.sends, self.spread.mesh, self.spread.axis).wait()
        if self._drops:
            back = torch.cat([back, back.new_zeros(1, *back.shape[1:])])
        return back.index_select(0, self.back)


class Travel(torch.autograd.Function):
    """Copies of tokens [t * k, hidden], sorted by expert, `out` to the ranks that hold the experts; or rows of the
    experts to where their tokens are, in the order of the tokens. Backward is the other way."""

    @staticmethod
    def forward(ctx, rows: Tensor, route: Route, out: bool, direction: str = "forward") -> Tensor:
        ctx.route, ctx.out = route, out
        return (route.out if out else route.returned)(rows, direction)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return Travel.apply(gradient, ctx.route, not ctx.out, "backward"), None, None, None
