"""Ranks that wait in a circle, each in a communication that the next has not come to: proved, not suspected.

A rank that has waited for a while writes into the store what it waits for, and how far it has come with every group of
ranks (`flight_recorder.RankGroup`). One that waits for a communication which another has not begun waits for that
rank's host; where such waits lead back to where they began, nobody will go on. That is so for as long as they wait, so
what is in the store need not be new. Collectives that were started and are not waited for count as begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..flight_recorder import EVENTS, MESSAGES

Report = Mapping[str, Any]
"""See `hang.report`."""
_MOST = 64
"""Ranks that are asked, of those that a rank waits for."""


def deadlocked(own: Report, ask: Callable[[int], Report | None]) -> bool:
    """Returns whether this rank waits in a circle. `ask`: for what another rank has written when it waited."""
    asked: dict[int, Report | None] = {own["rank"]: own}
    ahead, reached = [own], set()
    while ahead:
        one = ahead.pop()
        for event in one["waiting"]:
            for rank in event["ranks"][:_MOST]:
                if rank == one["rank"] or rank in reached:
                    continue
                if rank not in asked:
                    asked[rank] = ask(rank)
                if (other := asked[rank]) is not None and not has_begun(other, event):
                    reached.add(rank)
                    ahead.append(other)
    return own["rank"] in reached


def has_begun(one: Report, event: Mapping[str, Any]) -> bool:
    """Returns whether a rank has begun a communication, or may have: of messages it remembers the last."""
    if event["of"] != MESSAGES:
        return one["counts"].get(event["key"], 0) >= event["number"]
    known = [other for other in one["events"] if other["of"] == MESSAGES]
    return any(other["kind"] == event["kind"] for other in known) or (
        len(known) >= EVENTS and known[-1]["call"] >= event["call"]
    )
