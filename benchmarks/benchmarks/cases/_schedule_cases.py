"""What schedules of large pipelines take to generate, verify and simulate: CPU time, one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from benchmarks.cases._pairwise import quiet

LARGE = (64, 512, 4)
"""Ranks, microbatches, stages per rank: close to a million actions."""
MOST_SECONDS = 1.0
"""For a verdict on a schedule of LARGE."""
KINDS = ("interleaved", "interleaved-zb")


def seconds(function: Callable[[], object], times: int = 5) -> float:
    """The median CPU time of a call."""
    taken = []
    with quiet():
        for _ in range(times):
            began = time.process_time()
            function()
            taken.append(time.process_time() - began)
    return median(taken)


def crossed(schedule):
    """The schedule as one would write it by hand: every receive just before what consumes it.

    Right on a transport that buffers. Senders face each other, so that no transfer is next on both its ranks:
    for a verifier the dearer case.
    """
    consumes = {"RECV_F": "F", "RECV_B": "BI"}
    lists = []
    for actions in schedule.actions:
        posted = {
            (kind, *action[1:3]): action
            for action in actions
            if action.kind in consumes
            for kind in consumes[action.kind]
        }
        lists.append(
            tuple(each for action in actions if action.kind not in consumes for each in _after(posted, action))
        )
    return replace(schedule, actions=tuple(lists))


def _after(posted, action):
    receive = posted.get(action[:3])
    return (action,) if receive is None else (receive, action)
