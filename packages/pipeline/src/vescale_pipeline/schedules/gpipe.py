"""GPipe: every forward, then every backward (Huang et al., arXiv 1811.06965)."""

from __future__ import annotations

from ..action import Action
from ._shape import Shape


def gpipe(shape: Shape, rank: int) -> list[Action]:
    """All activations are kept: the peak is `microbatches`; the bubble is (p - 1) / (m + p - 1)."""
    kinds = ("F", "B")
    return [Action(kind, rank, microbatch) for kind in kinds for microbatch in range(shape.microbatches)]


def looped_bfs(shape: Shape, rank: int) -> list[Action]:
    """GPipe over several stages per rank, one stage after another (Lamy-Poirier, arXiv 2211.05953).

    The bubble is (p - 1) / (vm + p - 1). Each stage's weights are needed only
    twice per step, in one piece: kind to sharded parameters.
    """
    stages = shape.stages_of(rank)
    forward = [Action("F", stage, microbatch) for stage in stages for microbatch in range(shape.microbatches)]
    backward = [Action("B", stage, microbatch) for stage in stages[::-1] for microbatch in range(shape.microbatches)]
    return forward + backward
