"""Draws of a step that a device repeats from a graph. Their place in the sequence is no number of the host's: each run
of the graph reads from memory where the generator stands, and the host moves it on by what the step draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator

_now: Recorded | None = None
moved = 0
"""By how much the eager draws of sharded tensors have moved CUDA's generators."""


class Recorded:
    """Draws of one graph, from the generator of a device that numbers what it draws (CUDA's).

    Attributes:
        start: int64, the seed and a fourth of the offset, as kernels read them.
        moved: by how much a run moves the generator.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator, self.moved = generator, 0
        self.start = torch.zeros(2, dtype=torch.int64, device=generator.device)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """The block is captured: nothing in it asks the generator where it stands."""
        global _now
        before, _now = _now, self
        try:
            yield
        finally:
            _now = before

    @contextmanager
    def run(self) -> Iterator[None]:
        """The graph is run in the block."""
        if self.moved:
            seed, offset = self.generator.initial_seed(), self.generator.get_offset()
            self.start[0].fill_(seed - (1 << 64) if seed >> 63 else seed)
            self.start[1].fill_(offset // 4)
        yield
        if self.moved:
            self.generator.set_offset(offset + self.moved)


def recorded() -> Recorded | None:
    """Returns the graph that is captured."""
    return _now


def note_moved(offset: int) -> None:
    """Notes by how much an eager draw has moved its generator."""
    global moved
    moved += offset
