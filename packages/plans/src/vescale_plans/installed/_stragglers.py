"""Names a rank that is slower than the others: its own time from call to call of the model is 1.5 times the median's,
check after check.

Own is the time that passes on a rank without its waits for others: a rank that waits for a slow one takes as long as
that by the clock, and is not slow. Not the processor's time: a rank that waits for its data, or for a processor that
others use, is slow. A device that runs behind the host is not seen: of such a rank it is what the host takes.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from statistics import median_low

from vescale_dtensor import CommunicationError
from vescale_dtensor.engine import Mesh, fold_objects, own_s, place_of

CHECKS, SHARE, LEAST_US = 3, 1.5, 20_000
"""Checks one after another in which a rank is slow; what share of the median, and by how many microseconds more."""
OPTION = "VESCALE_SLOW_RANK"  # "end", in the environment: the job ends there
Told = tuple[int, int, int]
"""Microseconds of a call of the slowest rank, its place in the mesh, and the median; 0s where nothing was measured."""

_log = logging.getLogger("vescale")


class Stragglers:
    """The times of one model's calls. `clock`: seconds of this rank's own."""

    def __init__(self, mesh: Mesh, clock: Callable[[], float] = own_s) -> None:
        self._mesh, self._clock, self._since, self._call = mesh, clock, 0.0, 0
        self._slow, self._checks, self._first = -1, 0, 0

    def own(self, call: int, least: int) -> Told:
        """Returns this rank's time of a call since the last check, if there were at least so many calls since."""
        now, calls = self._clock(), call - self._call
        took = int((now - self._since) / calls * 1e6) if self._call and calls >= least else 0
        self._since, self._call = now, call
        return took, place_of(self._mesh.coordinate, self._mesh), took

    def judge(self, told: Told, call: int) -> None:
        """Says in the log, on rank 0, which rank is slow. With VESCALE_SLOW_RANK=end it raises CommunicationError, on
        all ranks alike. Cost: none, but where one is named, whose host is asked for."""
        most, place, median = told
        if not median or most <= max(SHARE * median, median + LEAST_US):
            self._checks = 0
            return
        self._checks = self._checks + 1 if place == self._slow else 1
        self._slow, self._first = place, call if self._checks == 1 else self._first
        if self._checks != CHECKS:
            return
        here = place_of(self._mesh.coordinate, self._mesh)
        host = fold_objects(socket.gethostname() if here == place else "", "".join, self._mesh)
        rule = (
            f"rank {place} of {self._mesh}, on {host}, takes {most / 1e3:.0f} ms from call to call of the model, "
            f"without its waits for other ranks, and the median is {median / 1e3:.0f} ms; so at {CHECKS} checks one "
            f"after another (calls {self._first} to {call})"
        )
        if os.environ.get(OPTION) == "end":
            remedies = [
                ("start again without that machine", ""),
                (f"unset {OPTION}", "it is told, and training goes on"),
            ]
            raise CommunicationError("model", rule, (), remedies)
        if not here:
            _log.warning("%s; with %s=end the job ends there", rule, OPTION)


def slowest(line: Sequence[Told]) -> Told:
    """Folds what ranks, or lines of them, know: the median of a mesh's lines' medians stands for that of all ranks."""
    most, place, _ = max(line)
    return most, place, median_low([median for *_, median in line])
