"""Reductions of buckets on their way, and what ranks tell each other about them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from vescale_dtensor.engine import GatherInFlight, Mesh, set_cause

from .bucket import SYNC, Bucket
from .sharded_parameter import ShardedParameter

MOST = 2
"""Sums under way before the oldest is waited for: bounds the memory of gradients under ZeRO-2 and 3."""


class RunningReduction:
    """The reduction of one bucket's gradients, started and on its way."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.running, self.missing = bucket.start()
        self.usage: Usage | None = None  # its own, where it is finished before the others

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that it holds while it is under way."""
        return 0 if self.running is None else self.bucket.packing.total * self.bucket.reduce.itemsize

    def advance(self) -> None:
        if self.running is not None:
            self.running.advance()

    def finish(self, usage: Usage | None = None) -> None:
        summed = self.bucket.shard[:0] if self.running is None else self.running.finish()
        usage = self.usage or usage
        self.bucket.hand_out(summed, self.missing, None if usage is None else usage.anywhere)
        if self.usage is not None:
            self.usage.close()


def newest(reductions: Sequence[RunningReduction], room: int | None) -> int:
    """Returns how many of the newest may be under way: `MOST`, and more than one only within `room` bytes, if that
    bounds."""
    count = 0
    for reduction in reductions[: -MOST - 1 : -1]:
        room = None if room is None else room - reduction.nbytes
        if count and room is not None and room < 0:
            break
        count += 1
    return count


class Usage:
    """Finds the parameters that any rank used in a backward: a small all-gather, started when made, read only if need
    be.

    Arguments: all reductions of the backward, in the same order on all ranks.
    """

    def __init__(self, reductions: Sequence[RunningReduction], mesh: Mesh) -> None:
        axes = tuple(sorted({axis for reduction in reductions for axis in reduction.bucket.axes}))
        self._at: dict[int, int] = {}
        mine: list[int] = []
        for reduction in reductions:
            missing = set(reduction.missing)
            for i, param in enumerate(reduction.bucket.params):
                at = self._at.setdefault(id(param), len(mine))
                if at == len(mine):
                    mine.append(0)
                mine[at] |= i not in missing
        self._everyone: list[int] | None = None
        self._gathering: GatherInFlight | None = None
        if axes:
            part = _on_device(bytes(mine), reductions[0].bucket.device)
            self._out = part.new_empty(mesh.count(axes) * len(mine))
            set_cause(SYNC)
            self._gathering = GatherInFlight(self._out, part, mesh, axes)

    def anywhere(self, param: ShardedParameter) -> bool:
        if self._out.is_meta:  # a dry run has no values: who asks did not use it, and nobody did
            return False
        if self._everyone is None:
            self._gathering.wait()
            self._everyone = self._out.view(-1, len(self._at)).amax(0).tolist()
        return bool(self._everyone[self._at[id(param)]])

    def close(self) -> None:
        """Waits, so that nothing stays under way."""
        if self._gathering is not None:
            self._gathering.wait()


def _on_device(values: bytes, device: torch.device) -> Tensor:
    """The bytes there. On an accelerator they are kept: most backwards tell the same, and the host waits for a copy."""
    return (_made if device.type in ("cpu", "meta") else _kept)(values, device)


def _made(values: bytes, device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8, device=device)


_kept = lru_cache(maxsize=64)(_made)


class HeldAlone:
    """Exchanges whether parameters that some ranks hold alone have a gradient: all ranks must see the same ones.

    What sums norms over `parameters()`, or counts steps, would otherwise meet other parameters on every rank.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh) -> None:
        self._buckets, self._mesh = buckets, mesh
        self._axes = tuple(axis for axis, size in enumerate(mesh.sizes) if size > 1)

    def exchange(self) -> None:
        """Cost: an all-gather of a byte per parameter."""
        mine = [param.parameter.grad is not None for bucket in self._buckets for param in bucket.params]
        if not mine:
            return
        part = _on_device(bytes(mine), self._buckets[0].device)
        out = part.new_empty(self._mesh.count(self._axes) * len(mine))
        set_cause(SYNC)
        GatherInFlight(out, part, self._mesh, self._axes).wait()
        used = out.view(-1, len(mine)).amax(0).tolist()
        for bucket in self._buckets:
            if bucket.is_elsewhere:
                bucket.used_elsewhere(used[: len(bucket.params)])
            used = used[len(bucket.params) :]
