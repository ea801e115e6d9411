"""Optimizers that look at whole matrices (Muon): every matrix goes to one rank of the data axis, and comes back.

    owner       the rank with the least work so far takes the next largest matrix; work is m n min(m, n), which is
                what an orthogonalisation of an m x n matrix costs
    there       gradient and weight by a RaggedShard of which the owner has all units; without a data axis, or where
                other axes cut the matrix, those axes gather it
    back        the owner's new weight, to the master's layout
    state       stays with the owner, whole: over ranks it is as balanced as the work

Other ranks step over an empty matrix of the same width, so that their states have the same keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from vescale_dtensor import Layout
from vescale_dtensor.engine import INVARIANT, Mesh, convert, flat, layout_of, local_only, stamp

from .slot import Slot


class Owners:
    """Who steps over which matrix, and the matrices on their way. `lead`: the data axis; None without one."""

    def __init__(self, slots: Sequence[Slot], mesh: Mesh, lead: int | None) -> None:
        self._mesh, self._lead = mesh, lead
        self._layouts: dict[int, Layout] = {}
        self._lent: dict[int, nn.Parameter] = {}
        self.work = [0] * (mesh.sizes[lead] if lead is not None else 1)
        for slot in sorted(slots, key=lambda one: (-_work(one.full_layout.shape), one.name)):
            self._give(slot)

    def _give(self, slot: Slot) -> Layout:
        """To who has the least to do."""
        owner, shape = self.work.index(min(self.work)), slot.full_layout.shape
        self.work[owner] += _work(shape)
        self._layouts[id(slot)] = made = self._owned(shape, owner, len(self.work))
        return made

    def _owned(self, shape: Sequence[int], owner: int, count: int) -> Layout:
        states = [INVARIANT] * self._mesh.ndim
        if self._lead is not None:
            units = tuple(prod(shape) if rank == owner else 0 for rank in range(count))
            states[self._lead] = flat(len(shape), units)
        return layout_of(self._mesh, states, shape)

    def layout(self, slot: Slot) -> Layout:
        known = self._layouts.get(id(slot))
        return self._give(slot) if known is None else known  # of a group that was added since

    def plain(self, slot: Slot) -> nn.Parameter:
        """The parameter that the optimizer keeps its state by: whole on the owner, empty on others."""
        lent = self._lent.get(id(slot))
        if lent is None:
            shape = self.local_shape(slot)
            lent = nn.Parameter(torch.empty(shape, dtype=slot.master.dtype, device=slot.master.device))
            self._lent[id(slot)] = lent
        return lent

    def local_shape(self, slot: Slot) -> tuple[int, ...]:
        shape, mine = slot.full_layout.shape, prod(self.layout(slot).local_shape)
        return tuple(shape) if mine or not prod(shape) else (0, *shape[1:])

    def bring(self, slot: Slot, gradient: Tensor | None) -> nn.Parameter:
        """The weight and its gradient to the owner. Cost: what the two lack there."""
        plain = self.plain(slot)
        with torch.no_grad():
            plain.data = self._whole(slot, slot.parameter)
            plain.grad = None if gradient is None else self._whole(slot, gradient)
        return plain

    def _whole(self, slot: Slot, tensor: Tensor) -> Tensor:
        owned = convert(tensor, self.layout(slot), "step", own=True)
        with local_only():
            local = owned.detach().view(self.local_shape(slot))
            local = local if local.dtype is slot.master.dtype else local.to(slot.master.dtype)
        return _plain(local)

    def send_back(self, slot: Slot) -> None:
        """The owner's new weight into the masters; its memory goes."""
        plain = self.plain(slot)
        with torch.no_grad():
            layout = self.layout(slot)
            local = plain.data.reshape(layout.local_shape)
            moved = convert(stamp(local, layout), slot.master_layout, "step")
            with local_only():
                slot.master.copy_(moved.view(slot.master.shape))
            plain.grad = None
            plain.data = plain.data.new_empty((0,) * plain.ndim)


def _plain(local: Tensor) -> Tensor:
    local.__class__ = Tensor
    return local


def _work(shape: Sequence[int]) -> int:
    return prod(shape) * min(shape) if shape else 1
