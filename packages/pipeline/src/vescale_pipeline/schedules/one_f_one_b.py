"""The family of 1F1B: after its warm-up, a rank alternates forwards and backwards.

    kind            stages per rank  hop  split  source
    1f1b            1                1    no     Narayanan et al., arXiv 2006.09503 (flushed: Fan et al., 2007.01045)
    interleaved     any              2    no     Narayanan et al., arXiv 2104.04473
    zb-h1           1                1    yes    Qi et al., arXiv 2401.10241, section 2.1
    zb-h2           1                2    yes    the same, section 2.2
    interleaved-zb  any              1    yes    zb-h1 over the stages of interleaved

The hop is how many forwards more each rank warms up with than the next one.
"""

from __future__ import annotations

from functools import partial

from ..action import Action
from ._shape import Shape


def alternate(shape: Shape, rank: int, hop: int, split: bool) -> list[Action]:
    """One rank's order.

    Forwards go in rounds of p microbatches, each round through all stages of the
    rank; backwards too, from the last stage. A split backward delays W by `hop` I's
    per rank before this one, which fills what the warm-up leaves free and keeps as many
    activations on every rank as the first one has.
    """
    stages = shape.stages_of(rank)
    forwards = [Action("F", stage, microbatch) for stage, microbatch in _in_rounds(shape, stages)]
    backwards = [Action("B", stage, microbatch) for stage, microbatch in _in_rounds(shape, stages[::-1])]
    # In steps of the whole rounds; microbatches that a last round lacks fall out afterwards.
    hop = hop if shape.virtual > 1 or split else 1
    ahead = (shape.virtual - 1) * shape.ranks + hop * (shape.ranks - 1 - rank)
    order = forwards[:ahead]
    for step, backward in enumerate(backwards):
        order += [*forwards[ahead + step : ahead + step + 1], backward]
    order = [action for action in order if action.microbatch < shape.microbatches]
    return delay_weights(order, hop * rank) if split else order


def delay_weights(order: list[Action], delay: int) -> list[Action]:
    """Every B as an I, and its W after `delay` further ones."""
    split: list[Action] = []
    delayed: list[Action] = []
    for action in order:
        if action.kind != "B":
            split.append(action)
            continue
        split.append(action._replace(kind="I"))
        delayed.append(action._replace(kind="W"))
        if len(delayed) > delay:
            split.append(delayed.pop(0))
    return split + delayed


def _in_rounds(shape: Shape, stages: list[int]) -> list[tuple[int, int]]:
    rounds = range(0, shape.microbatches, shape.ranks)
    return [(stage, first + place) for first in rounds for stage in stages for place in range(shape.ranks)]


one_f_one_b = partial(alternate, hop=1, split=False)
interleaved = partial(alternate, hop=2, split=False)
zb_h1 = interleaved_zb = partial(alternate, hop=1, split=True)
zb_h2 = partial(alternate, hop=2, split=True)
