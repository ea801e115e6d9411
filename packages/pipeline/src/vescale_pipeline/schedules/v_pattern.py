"""V-Half and V-Min: a half and a third of 1F1B's memory (Qi et al., arXiv 2405.15362, "controllable memory").

One microbatch's way down the V and back is a pattern of times; every microbatch
repeats it six units later, which is what a rank computes per microbatch (two F,
two I, two W). The steeper the pattern, the shorter its activations live. The
pattern decides the order of F and I; W runs wherever a rank would otherwise wait,
or where the next F would exceed the memory that the authors state.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..action import Action
from ._shape import Shape

PERIOD = 6
Orders = list[list[Action]]


def v_half(shape: Shape) -> Orders:
    """V schedule with at most (p + 2) / 2 microbatches alive; idle 3(p - 1) units of half a rank's F, half of
    1F1B's."""
    return _fill_weights(shape, _pattern(shape, steps=(1, 2, 1, 2), turn=1), most=shape.ranks + 2)


def v_min(shape: Shape) -> Orders:
    """V schedule with at most (p + 4) / 3 microbatches alive; idle about 4p units of half a rank's F, 2/3 of 1F1B's."""
    # With ranks in threes the ways down and up would meet in the same unit on every rank: the turn takes two more.
    turn = 3 if shape.ranks % 3 == 0 else 1
    return _fill_weights(shape, _pattern(shape, steps=(1, 1, 1, 1), turn=turn), most=2 * (shape.ranks + 4) / 3)


def _pattern(shape: Shape, steps: Sequence[int], turn: int) -> Orders:
    """Per rank, F and I by the pattern's times.

    Arguments:
        steps: units from rank to rank, of F down and up the V and of I down and up.
        turn: units from the end of the forward to the begin of the backward.
    """
    hops = shape.ranks - 1
    down, up, back_down, back_up = steps
    forward_end = (down + up) * hops + 1
    orders = []
    for rank in range(shape.ranks):
        above, below = rank, hops - rank
        first, second = rank, 2 * shape.ranks - 1 - rank
        times = {
            ("F", first): down * above,
            ("F", second): down * hops + 1 + up * below,
            ("I", second): forward_end + turn + back_down * above,
            ("I", first): forward_end + turn + back_down * hops + 1 + back_up * below,
        }
        timed = [
            (time + PERIOD * microbatch, kind == "F", Action(kind, stage, microbatch))
            for (kind, stage), time in times.items()
            for microbatch in range(shape.microbatches)
        ]
        orders.append([action for *_, action in sorted(timed)])
    return orders


def _fill_weights(shape: Shape, orders: Orders, most: float) -> Orders:
    """The orders with their W, by running all ranks in units of time.

    Arguments:
        orders: F and I of each rank.
        most: stage activations that may be alive on a rank, from F to W.
    """
    ranks = [_Rank(order, most) for order in orders]
    done = {("F", -1, m) for m in range(shape.microbatches)} | {
        ("I", shape.stages, m) for m in range(shape.microbatches)
    }
    while True:
        ran = [rank.run(done) for rank in ranks]
        if not any(ran):
            return [rank.filled for rank in ranks]
        done.update(action[:3] for action in ran if action is not None)


class _Rank:
    """One rank under way: what it still has to do, and what it keeps alive."""

    def __init__(self, order: list[Action], most: float) -> None:
        self.order, self.most = iter(order), most
        self.next = next(self.order, None)
        self.alive = 0
        self.weights: list[Action] = []
        self.filled: list[Action] = []

    def run(self, done: set[tuple[str, int, int]]) -> Action | None:
        """Runs one action, for one unit of time, given what all ranks have done before; None when it has to wait."""
        action = self.next
        if action is not None and self._is_ready(action, done):
            self.next = next(self.order, None)
        elif self.weights:
            action = self.weights.pop(0)
        else:
            return None
        self.filled.append(action)
        self.alive += {"F": 1, "I": 0, "W": -1}[action.kind]
        if action.kind == "I":
            self.weights.append(action._replace(kind="W"))
        return action

    def _is_ready(self, action: Action, done: set[tuple[str, int, int]]) -> bool:
        kind, stage, microbatch, _ = action
        if (kind, stage - 1 if kind == "F" else stage + 1, microbatch) not in done:
            return False
        return kind == "I" or self.alive + 1 <= self.most or not self.weights
