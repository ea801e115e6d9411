"""The sums of a backward over ranks: when the gradients of each unit's buckets start on their way, and their end.

They start in one fixed order, that of the blocks reversed and then the root, whose embedding
is what backward reaches last, and within each that of its buckets reversed, so that all ranks
start the same collectives whatever each of them used. A gradient that comes again after its sum
has started (a reentrant checkpoint, a block that runs twice) is summed in a second
round. Each contribution is thereby reduced exactly once and then ADDED to what earlier
backwards left: several backwards before a step come out as on one device (design
section 3, contract 9).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .bucket import Bucket
from .running_reductions import HeldAlone, RunningReduction, Usage, newest
from .sharded_parameter import Sharing
from .units import FSDPUnit


class GradientReductions:
    """See the module."""

    def __init__(self, sharing: Sharing) -> None:
        self.buckets: list[Bucket] = []  # in the order of their sums
        self._sharing = sharing
        self._next = 0
        self._running: list[RunningReduction] = []
        # Whether a backward has sent nothing but sums over the axes of sums: else these keep their place among what it
        # sends itself, behind a whole block. None until one has been seen; all ranks see the same.
        self.is_alone: bool | None = None
        self._groups: list = []
        self._sent = 0

    def look_at(self, units: Sequence[FSDPUnit], apart: Sequence[Bucket]) -> None:
        """Sums these from here on.

        Arguments:
            units: of a model, the root last.
            apart: the trained buckets that some ranks hold alone.
        """
        *others, root = units
        self.buckets = [bucket for unit in (*reversed(others), root) for bucket in reversed(unit.reduced)]
        self._groups = []
        self._keeps_parts = any(bucket.keep == "part" for bucket in self.buckets)
        self._apart = HeldAlone(apart, self._sharing.mesh)

    def begin(self) -> None:
        """A backward comes to the model."""
        if not self._groups:
            axes = {each for bucket in self.buckets for each in (bucket.inner, bucket.outer) if each}
            self._groups = [self._sharing.mesh.rank_group(each) for each in sorted(axes)]
        self._sent = self._count()

    def _count(self) -> int:
        return sum(group.count for group in self._groups)

    def _look(self) -> None:
        """Before anything is sent here: whether the backward has sent anything."""
        if self._count() != self._sent:
            self.is_alone = False

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Their gradients are complete: they are summed as soon as those before them in the order are."""
        for bucket in buckets:
            bucket.started = True
        while self._next < len(self.buckets) and self.buckets[self._next].started:
            self._start(self.buckets[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        self._look()
        with torch.no_grad():
            self._running.append(reduction := RunningReduction(bucket))
            if bucket.is_hooked and self._keeps_parts:
                reduction.usage = Usage([reduction], self._sharing.mesh)
            under_way = newest(self._running, self._sharing.ahead_bytes)
            for reduction in self._running[: len(self._running) - under_way]:
                reduction.advance()
            while len(self._running) > under_way and self._running[0].bucket.is_hooked:  # its gradients may go then
                reduction = self._running.pop(0)
                reduction.finish()
                reduction.bucket.run_hooks()
        self._sent = self._count()

    def finish(self, enabled: bool) -> None:
        """The backward is through: starts what is left, unless gradients are to stay partial, waits for all, and hands
        out the reduced gradients."""
        if enabled:
            self._look()
            if self.is_alone is None:
                self.is_alone = True
            self.start(self.buckets)
            # What came again after its sum had started.
            self._running += [RunningReduction(bucket) for bucket in self.buckets if bucket.flat is not None]
        running, self._running = self._running, []
        self._next = 0
        for bucket in self.buckets:
            bucket.leave()
        if not (enabled or running):
            return
        usage = Usage(running, self._sharing.mesh) if self._keeps_parts else None
        for reduction in running:
            reduction.advance()
        for reduction in running:
            reduction.finish(usage)
        if usage is not None:
            usage.close()
        self._apart.exchange()
        for reduction in running:
            reduction.bucket.run_hooks()
