"""ZBV: no bubble, at the memory of 1F1B, with two stages per rank in a V (Qi et al., arXiv 2401.10241, section 6)."""

from __future__ import annotations

from ..action import Action
from ._shape import Shape


class Chunks:
    """A rank's two stages, 0 on the way down the V and 1 on the way up, each with its next microbatch per kind."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.stages = (rank, 2 * shape.ranks - 1 - rank)
        self.microbatches = shape.microbatches
        self.counts: dict[str, int] = {}
        self.order: list[Action] = []

    def add(self, *words: str) -> None:
        """Adds the next action of each word, such as F0 or W1: its kind and its stage. Beyond the last: nothing."""
        for kind, chunk in words:
            # A whole backward and the first half of a split one count as one.
            counted = ("B" if kind == "I" else kind) + chunk
            microbatch = self.counts[counted] = self.counts.get(counted, -1) + 1
            if kind == "B":
                self.counts["W" + chunk] = microbatch
            if microbatch < self.microbatches:
                self.order.append(Action(kind, self.stages[int(chunk)], microbatch))


def zbv(shape: Shape, rank: int) -> list[Action]:
    """Idle is only the ramp: p - 1 units at a barrier, none within a rank's own window, if F, I and W cost the same.

    At most p microbatches alive on every rank (2p stage microbatches).
    """
    chunks = Chunks(shape, rank)
    below = shape.ranks - rank
    # The steps of a full pipeline; microbatches that there are not leave gaps in them.
    steps = max(shape.microbatches, 2 * shape.ranks - 1)
    chunks.add(*["F0"] * (2 * below - 1))
    chunks.add(*["F1", "F0"] * rank)
    chunks.add(*["F1", "I1", "W1"] * below)
    for _ in range(steps - shape.ranks):
        chunks.add("F0", "I0", "W0", "F1", "I1", "W1")
    chunks.add(*["I0", "I1"] * rank)
    chunks.add(*["I0", "W0"] * below)
    chunks.add(*["W1"] * rank, *["W0"] * rank)
    return chunks.order
