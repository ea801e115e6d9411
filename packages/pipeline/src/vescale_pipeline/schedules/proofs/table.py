"""Table: a schedule's actions as columns, so that a million of them are checked at once; pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from ..._errors import ScheduleError
from ...action import KINDS, Schedule

CODE = {kind: code for code, kind in enumerate(KINDS)}
NO_PEER = -(1 << 40)
"""Stands for None in the column of peers: no integer that a schedule could mean."""


@dataclass(frozen=True)
class Table:
    """All actions, rank after rank, each rank's in order; int64 columns of one length.

    Arguments:
        schedule: what it was made from.
        kind: codes of KINDS.
        stage, microbatch: as written, whatever was written.
        peer: as written; NO_PEER for none.
        rank, place: where the action stands.
    """

    schedule: Schedule
    kind: Tensor
    stage: Tensor
    microbatch: Tensor
    peer: Tensor
    rank: Tensor
    place: Tensor

    @classmethod
    def of(cls, schedule: Schedule) -> Table:
        """Raises ScheduleError for an unknown kind, and for numbers that are not integers."""
        # One pass over the actions: to reach a million scattered objects is what takes the time.
        flat = list(chain.from_iterable(chain.from_iterable(schedule.actions)))
        if len(flat) != 4 * sum(map(len, schedule.actions)):
            raise ScheduleError("verify", "an action is not a kind, a stage, a microbatch and a peer")
        kinds, stages, microbatches, peers = (flat[column::4] for column in range(4))
        try:
            codes = array("b", map(CODE.__getitem__, kinds))
        except (KeyError, TypeError) as error:
            raise ScheduleError("verify", f"{error} is no kind of action", [f"kinds  {', '.join(KINDS)}"]) from None
        lengths = [len(actions) for actions in schedule.actions]
        return cls(
            schedule,
            _column(codes, torch.int8).long(),
            _integers("stage", stages),
            _integers("microbatch", microbatches),
            _integers("peer", [NO_PEER if peer is None else peer for peer in peers]),
            torch.cat([torch.full((length,), rank) for rank, length in enumerate(lengths)]),
            torch.cat([torch.arange(length) for length in lengths]),
        )

    @cached_property
    def placement(self) -> Tensor:
        """Rank of each stage."""
        return torch.tensor(self.schedule.placement)

    def __len__(self) -> int:
        return len(self.kind)

    def where(self, index: int) -> str:
        """An action of the schedule, for people."""
        rank, place = int(self.rank[index]), int(self.place[index])
        return f"rank {rank}, action {place}: {self.schedule.actions[rank][place]}"


def _integers(name: str, values: list) -> Tensor:
    try:
        return _column(array("q", values), torch.int64)
    except (TypeError, OverflowError) as error:
        raise ScheduleError("verify", f"a {name} is not an integer: {error}") from None


def _column(numbers: array, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
