"""Reductions of buffers on their way, and what ranks tell each other about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vescale_dtensor.debug import Cause
from vescale_dtensor.engine import Mesh, PendingGather, PendingReduction, set_cause

if TYPE_CHECKING:
    from ._buffer import Buffer, Slot

SYNC = Cause("gradient sync", direction="backward")


class InFlight:
    """The reduction of one buffer's gradients on its way."""

    def __init__(self, buffer: Buffer, pending: PendingReduction, missing: list[int]) -> None:
        self.buffer, self.pending, self.missing = buffer, pending, missing

    def finish(self, usage: Usage | None = None) -> None:
        self.buffer.settle(self.pending.finish(), self.missing, usage)


class Usage:
    """Which parameters any rank used in a backward: a small all-gather, started when made, read only if need be.

    Arguments: all reductions of the backward, in the same order on all ranks.
    """

    def __init__(self, flights: Sequence[InFlight], mesh: Mesh) -> None:
        axes = tuple(sorted({axis for flight in flights for axis in flight.buffer.axes}))
        self._at: dict[int, int] = {}
        mine: list[int] = []
        for flight in flights:
            missing = set(flight.missing)
            for i, slot in enumerate(flight.buffer.slots):
                at = self._at.setdefault(id(slot), len(mine))
                if at == len(mine):
                    mine.append(0)
                mine[at] |= i not in missing
        self._everyone: list[int] | None = None
        self._pending: PendingGather | None = None
        if axes:
            part = torch.tensor(mine, dtype=torch.uint8, device=flights[0].buffer.device)
            self._out = part.new_empty(mesh.count(axes) * len(mine))
            set_cause(SYNC)
            self._pending = PendingGather(self._out, part, mesh, axes)

    def anywhere(self, slot: Slot) -> bool:
        if self._everyone is None:
            self._pending.wait()
            self._everyone = self._out.view(-1, len(self._at)).amax(0).tolist()
        return bool(self._everyone[self._at[id(slot)]])

    def close(self) -> None:
        """Waits, so that nothing stays under way."""
        if self._pending is not None:
            self._pending.wait()
