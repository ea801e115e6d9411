"""Adds sends, receives and reduces to per-rank lists of compute actions; pure.

The compute actions of all ranks are put in one total order, by when they start
at unit costs; a transfer follows the action that makes its tensor; and each
rank's list is its part of that order. So the two ends of every channel agree on
its order, and no schedule made here can deadlock, however little its transport
buffers: whichever transfer comes first in the total order can always run. A
receive is posted before what its rank computes while the tensor is being made:
so it never holds a transfer up, and transfers run beside computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from ..._errors import ScheduleError
from ...action import ALL_MICROBATCHES, COMPUTE, FORMAT_VERSION, Action, Schedule

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Costs of compute actions, as the published analyses of schedules assume them."""

_TIES = {"F": 0, "B": 1, "I": 1, "W": 2}

Orders = Sequence[Sequence[Action]]
"""Per rank, its compute actions in order."""


def add_communication(name: str, placement: Sequence[int], microbatches: int, orders: Orders) -> Schedule:
    """Returns a complete schedule, given what each rank computes.

    Arguments:
        name, placement, microbatches: as for `Schedule`.
        orders: the F, B, I and W actions of each rank, in order.

    Raises ScheduleError if the orders wait for each other, or name stages of another rank. `verify` checks whether they
    cover every microbatch.
    """
    _check_orders(placement, microbatches, orders)
    stages = len(placement)
    actions: list[list[Action]] = [[] for _ in orders]
    reduces = _last_weight_gradients(orders)
    for action in _in_time_order(stages, orders):
        kind, stage, microbatch, _ = action
        rank = placement[stage]
        actions[rank].append(action)
        if kind == "F" and stage + 1 < stages and (peer := placement[stage + 1]) != rank:
            actions[rank].append(Action("SEND_F", stage, microbatch, peer))
            actions[peer].append(Action("RECV_F", stage + 1, microbatch, rank))
        elif (kind == "B" or kind == "I") and stage > 0 and (peer := placement[stage - 1]) != rank:
            actions[rank].append(Action("SEND_B", stage, microbatch, peer))
            actions[peer].append(Action("RECV_B", stage - 1, microbatch, rank))
        if reduces.get(stage) is action:
            actions[rank].append(Action("REDUCE", stage, ALL_MICROBATCHES))
    return Schedule(
        FORMAT_VERSION, name, len(orders), microbatches, stages, tuple(placement), tuple(map(tuple, actions))
    )


def _check_orders(placement: Sequence[int], microbatches: int, orders: Orders) -> None:
    operation = "add_communication"
    for stage, rank in enumerate(placement):
        if not 0 <= rank < len(orders):
            raise ScheduleError(operation, f"stage {stage} is placed on rank {rank} of {len(orders)}")
    for rank, order in enumerate(orders):
        for action in order:
            kind, stage, microbatch, _ = action
            if kind not in COMPUTE:
                raise ScheduleError(operation, f"rank {rank} has {action}, which is not F, B, I or W")
            if not (0 <= stage < len(placement) and placement[stage] == rank and 0 <= microbatch < microbatches):
                rule = f"rank {rank} has {action}, which is not of a stage and microbatch of its own"
                raise ScheduleError(operation, rule, [f"placement  {placement}", f"microbatches  {microbatches}"])


def _last_weight_gradients(orders: Orders) -> dict[int, Action]:
    """Stage -> the action, itself, after which its weight gradients are complete."""
    return {action.stage: action for order in orders for action in order if action.kind in "BW"}


def _in_time_order(stages: int, orders: Orders) -> list[Action]:
    """All compute actions by when they start, each at its unit cost and as early as its inputs allow.

    Of those that start together, a sender goes before what its receiver computes, so that its receive is posted by
    then: forwards down the stages, then backwards up.
    """
    ends: dict[tuple[bool, int, int], int] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    clocks, places = [0] * len(orders), [0] * len(orders)
    running: list[tuple[int, int, Action]] = []
    started: list[tuple[int, int, int, Action]] = []

    def start(rank: int) -> None:
        if places[rank] == len(orders[rank]):
            return
        action = orders[rank][places[rank]]
        kind, stage, microbatch, _ = action
        begin = clocks[rank]
        source = stage - 1 if kind == "F" else stage + 1
        if kind != "W" and 0 <= source < stages:
            needs = (kind == "F", source, microbatch)
            if needs not in ends:
                waiting[needs] = rank
                return
            begin = max(begin, ends[needs])
        places[rank] += 1
        heappush(running, (begin + UNITS[kind], rank, action))
        started.append((begin, _TIES[kind], stage if kind == "F" else -stage, action))

    for rank in range(len(orders)):
        start(rank)
    while running:
        end, rank, action = heappop(running)
        kind, stage, microbatch, _ = action
        clocks[rank] = end
        made = (kind == "F", stage, microbatch)
        if kind != "W":
            ends[made] = end
        start(rank)
        if kind != "W" and made in waiting:
            start(waiting.pop(made))
    if stuck := [rank for rank, order in enumerate(orders) if places[rank] < len(order)]:
        lines = [f"rank {rank} waits before {orders[rank][places[rank]]}" for rank in stuck]
        raise ScheduleError("add_communication", "these ranks' orders wait for each other", lines)
    return [action for *_, action in sorted(started)]
