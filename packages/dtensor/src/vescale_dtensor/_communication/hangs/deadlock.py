"""Ranks that wait for each other, each in a communication that the other has not come to: proved, not suspected.

A rank that has waited for a while writes into the store what it waits for, and how far it has come with every group
of ranks (`flight_recorder.RankGroup`). Two that wait are in a deadlock if each waits for a communication of both that
the other has not begun: neither will, for its host stands in the other. That is so for as long as both wait, so what is
in the store need not be new. Collectives that were started and are not waited for count as begun.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from time import monotonic
from typing import Any

from .. import flight_recorder as recorder
from ..flight_recorder import RankGroup

AFTER_S = 4.0
"""A wait that is longer is written down: long for a step, and short for a person."""
_MOST = 64
"""Ranks that are asked, of those that a rank waits for."""
_KEY = "waits"


class Waits:
    """This rank's wait, as the others can read it."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank, self._told = store, rank, 0

    def look(self) -> RankGroup | None:
        """The group over which this rank waits in a deadlock; None if there is none, or none is known yet. A rank
        that has not waited for AFTER_S asks the store nothing."""
        entry = next((one for one in list(recorder.ring) if _waits(one)), None)
        if entry is None:
            return None
        group, number = entry[2], entry[3]
        counts = _counts()
        if self._told != id(entry):
            said = {"key": group.key, "ranks": group.ranks, "number": number, "counts": counts}
            self._store.set(f"{_KEY}/{self._rank}", json.dumps(said))
            self._told = id(entry)
        for rank in group.ranks[:_MOST]:
            if rank != self._rank and self._store.check([f"{_KEY}/{rank}"]):
                other = json.loads(self._store.get(f"{_KEY}/{rank}"))
                if deadlocked(self._rank, group.key, number, counts, other):
                    return group
        return None


def deadlocked(rank: int, key: str, number: int, counts: Mapping[str, int], other: Mapping[str, Any]) -> bool:
    """True if this rank, which waits for `number` of the group `key` and has begun `counts`, and one that has said
    `other` wait for each other."""
    waits_for_us = rank in other["ranks"] and counts.get(other["key"], 0) < other["number"]
    return waits_for_us and other["counts"].get(key, 0) < number


def _waits(entry: list) -> bool:
    return entry[recorder.STATE] == recorder.WAITING and monotonic() - entry[recorder.BEGAN] > AFTER_S


def _counts() -> dict[str, int]:
    """Counts by group; the most among meshes with the same axes and ranks: a rank is rather taken to have begun."""
    found: dict[str, int] = {}
    for group in list(recorder.rank_groups):
        found[group.key] = max(group.count, found.get(group.key, 0))
    return found
