"""Scratch memory of a backend's collectives while they run, which no tensor of ours shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import nlargest

import torch

from vescale_dtensor.debug import Event

_THREADS = 2
"""Collectives that run at once, of torch's gloo (`ProcessGroupGloo.Options`); others wait, and have nothing yet."""
SCRATCH: dict[str, dict[object, Callable[..., int]]] = {
    "gloo": {torch.ops.c10d._allgather_base_.default: lambda out, *rest, **more: out.nbytes}
}
"""Backend -> collective -> bytes: gloo gathers into memory of its own, and copies from there."""


class Scratch:
    """Bytes by kind that collectives under way may hold: from their start until somebody waits for them, at the most.

    `taken` is of this moment; `grown` is told when it is more than before.
    """

    def __init__(self, backend: str, grown: Callable[[], None]) -> None:
        self.taken: Counter[str] = Counter()
        self._sizes, self._grown = SCRATCH.get(backend, {}), grown
        self._announced: Event | None = None
        self._under_way: dict[int, tuple[str, int]] = {}

    def begins(self, event: Event) -> None:
        """A collective is announced: the next to be called is it."""
        self._announced = event

    def called(self, function: object, args: tuple, kwargs: dict, kind: str) -> None:
        """A collective was called. One that nobody announced is a user's, and over at once."""
        event, self._announced = self._announced, None
        if (size := self._sizes.get(function)) is not None:
            self._under_way[id(event)] = kind, size(*args, **kwargs)
            self._count()
            self._grown()
            if event is None:
                self.ends(event)

    def ends(self, event: Event | None) -> None:
        """Somebody has waited for it."""
        if self._under_way.pop(id(event), None) is not None:
            self._count()

    def _count(self) -> None:
        self.taken.clear()
        for kind, size in nlargest(_THREADS, self._under_way.values(), key=lambda one: one[1]):
            self.taken[kind] += size
