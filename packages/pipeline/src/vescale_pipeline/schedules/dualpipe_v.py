"""DualPipeV: two stages per rank in a V, forwards and backwards in pairs that can overlap (DeepSeek, DualPipe, 2025).

DualPipe cut in half: the same order without a second copy of the parameters.
"""

from __future__ import annotations

from ..action import Action
from ._shape import Shape
from .zbv import Chunks


def dualpipe_v(shape: Shape, rank: int) -> list[Action]:
    """The bubble is (p - 1) / (3m + p - 1) when nothing overlaps; at most p + 1/2 microbatches alive.

    Backwards are whole where a forward runs beside them; at the ramps they are
    split, so that weight gradients fill what would be idle.
    """
    chunks = Chunks(shape, rank)
    above, below = rank + 1, shape.ranks - rank - 1
    # The steps of a full pipeline; microbatches that there are not leave gaps in them.
    steps = max(shape.microbatches, 2 * shape.ranks)
    chunks.add(*["F0"] * (2 * below))
    chunks.add(*["F0", "F1"] * above)
    chunks.add(*["I1", "W1", "F1"] * below)
    for _ in range(steps - 2 * shape.ranks + above):
        chunks.add("F0", "B1", "F1", "B0")
    for _ in range(below):
        chunks.add("B1", "F1", "B0")
    backwards = ["B1", "B0"] * above
    chunks.add(*backwards[:above])
    # Backwards from here on leave their weights to a queue.
    queue = [word[1] for word in backwards[above:]]
    chunks.add(*["I" + chunk for chunk in queue])
    for _ in range(below):
        queue.append("0")
        chunks.add("W" + queue.pop(0), "I0")
    chunks.add(*["W" + chunk for chunk in queue])
    return chunks.order
