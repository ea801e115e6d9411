"""1F1B: as soon as a rank can, it alternates forwards and backwards (Narayanan et al., arXiv 2006.09503)."""

from __future__ import annotations

from ..action import Action
from ._shape import Shape


def one_f_one_b(shape: Shape, rank: int) -> list[Action]:
    """The bubble of GPipe, (p - 1) / (m + p - 1), with at most p - rank microbatches alive."""
    ahead = min(shape.ranks - rank, shape.microbatches)
    order = [Action("F", rank, microbatch) for microbatch in range(ahead - 1)]
    for microbatch in range(shape.microbatches):
        if (forward := microbatch + ahead - 1) < shape.microbatches:
            order.append(Action("F", rank, forward))
        order.append(Action("B", rank, microbatch))
    return order
