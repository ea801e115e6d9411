"""Optimizers that look at whole matrices (Muon): every matrix goes to one rank of the data axis, and comes back.

    owner       the rank with the least work so far takes the next largest matrix; work is m n min(m, n), which is
                what an orthogonalisation of an m x n matrix costs
    there       gradient and weight by a RaggedShard of which the owner has all units; without a data axis, or where
                other axes cut the matrix, those axes gather it
    back        the owner's new weight, to the full-precision shard's layout
    state       stays with the owner, whole: over ranks it is as balanced as the work

Other ranks step over an empty matrix of the same width, so that their states have the same keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from vescale_dtensor import Layout
from vescale_dtensor.engine import INVARIANT, Mesh, attach, convert, flat, layout_of, local_only

from .sharded_parameter import ShardedParameter


class Owners:
    """Owners of matrices, and the matrices on their way. `lead`: the data axis; None without one."""

    def __init__(self, params: Sequence[ShardedParameter], mesh: Mesh, lead: int | None) -> None:
        self._mesh, self._lead = mesh, lead
        self._layouts: dict[int, Layout] = {}
        self._lent: dict[int, nn.Parameter] = {}
        self.work = [0] * (mesh.sizes[lead] if lead is not None else 1)
        for param in sorted(params, key=lambda one: (-_work(one.full_layout.shape), one.name)):
            self._give(param)

    def _give(self, param: ShardedParameter) -> Layout:
        """Gives a matrix to the rank that has the least to do."""
        owner, shape = self.work.index(min(self.work)), param.full_layout.shape
        self.work[owner] += _work(shape)
        self._layouts[id(param)] = made = self._owned(shape, owner, len(self.work))
        return made

    def _owned(self, shape: Sequence[int], owner: int, count: int) -> Layout:
        states = [INVARIANT] * self._mesh.ndim
        if self._lead is not None:
            units = tuple(prod(shape) if rank == owner else 0 for rank in range(count))
            states[self._lead] = flat(len(shape), units)
        return layout_of(self._mesh, states, shape)

    def layout(self, param: ShardedParameter) -> Layout:
        known = self._layouts.get(id(param))
        return self._give(param) if known is None else known  # of a group that was added since

    def plain(self, param: ShardedParameter) -> nn.Parameter:
        """The parameter that the optimizer keeps its state by: whole on the owner, empty on others."""
        lent = self._lent.get(id(param))
        if lent is None:
            shape = self.local_shape(param)
            lent = nn.Parameter(torch.empty(shape, dtype=param.shard.dtype, device=param.shard.device))
            self._lent[id(param)] = lent
        return lent

    def local_shape(self, param: ShardedParameter) -> tuple[int, ...]:
        shape, mine = param.full_layout.shape, prod(self.layout(param).local_shape)
        return tuple(shape) if mine or not prod(shape) else (0, *shape[1:])

    def bring(self, param: ShardedParameter, gradient: Tensor | None) -> nn.Parameter:
        """The weight and its gradient to the owner. Cost: what the two lack there."""
        plain = self.plain(param)
        with torch.no_grad():
            plain.data = self._full_values(param, param.parameter)
            plain.grad = None if gradient is None else self._full_values(param, gradient)
        return plain

    def _full_values(self, param: ShardedParameter, tensor: Tensor) -> Tensor:
        owned = convert(tensor, self.layout(param), "step", own=True)
        with local_only():
            local = owned.detach().view(self.local_shape(param))
            local = local if local.dtype is param.shard.dtype else local.to(param.shard.dtype)
        local.__class__ = Tensor
        return local

    def send_back(self, param: ShardedParameter) -> None:
        """The owner's new weight into the full-precision shards; its memory goes."""
        plain = self.plain(param)
        with torch.no_grad():
            layout = self.layout(param)
            local = plain.data.reshape(layout.local_shape)
            moved = convert(attach(local, layout), param.shard_layout, "step")
            with local_only():
                param.shard.copy_(moved.view(param.shard.shape))
            plain.grad = None
            plain.data = plain.data.new_empty((0,) * plain.ndim)


def _work(shape: Sequence[int]) -> int:
    return prod(shape) * min(shape) if shape else 1
