"""A collective in a command that was typed: all ranks of it are let in together, or none.

A person types what communicates on one rank alone, or while a rank stands elsewhere: that collective would meet the
next one of the others, and change their numbers. So before each collective the ranks of its group tell each other, in
the store, that they have come to it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from .._communication import events, flight_recorder
from .._errors import CommunicationError
from .session import Stop, wait

MEETING_SECONDS = 120.0
"""So long a rank waits for the others to come to a collective of a command."""
_COLLECTIVES = """
    all_reduce all_reduce_coalesced all_gather all_gather_coalesced all_gather_into_tensor all_gather_single
    all_gather_object reduce_scatter reduce_scatter_tensor reduce_scatter_single all_to_all all_to_all_single broadcast
    broadcast_object_list reduce gather gather_into_tensor gather_single gather_object scatter scatter_object_list
    barrier monitored_barrier
"""
WHOLE_GROUP = tuple(name for name in _COLLECTIVES.split() if hasattr(dist, name))
"""Functions of torch.distributed that a person may type: those of them that the installed torch has."""
_GAVE_UP = "gave up"


@contextlib.contextmanager
def together(stop: Stop) -> Iterator[None]:
    """Within the block, which executes one command of `stop`, no collective begins that not all its ranks begin."""
    counts: Counter[int] = Counter()

    def meet(kind: str, ranks: Sequence[int], where: str) -> None:
        group = zlib.crc32(repr(tuple(ranks)).encode())
        counts[group] += 1
        _meet(stop, kind, ranks, f"{stop.name}/meet/{stop.number}/{group}/{counts[group]}", where)

    if stop.size == 1:
        yield
        return
    with before_collectives(meet):
        yield


@contextlib.contextmanager
def before_collectives(meet: Callable[[str, Sequence[int], str], None]) -> Iterator[None]:
    """Within the block every collective of ours and of torch.distributed first calls `meet(kind, ranks, where)`."""

    def note(kind: str, group: flight_recorder.RankGroup, *more: Any) -> flight_recorder.Noted:
        meet(kind, group.ranks, f" over axis {', '.join(map(repr, group.axes))}, asked for by {events.cause()}")
        return original(kind, group, *more)

    def guarded(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            group = signature.bind_partial(*args, **kwargs).arguments.get("group")
            meet(function.__name__, dist.get_process_group_ranks(group or dist.group.WORLD), "")
            return function(*args, **kwargs)

        return run

    original, flight_recorder.note = flight_recorder.note, note
    changed = []
    for name in WHOLE_GROUP:
        run = guarded(getattr(dist, name))
        for module in (dist, dist.distributed_c10d):
            changed.append((module, name, getattr(module, name)))
            setattr(module, name, run)
    try:
        yield
    finally:
        flight_recorder.note = original
        for module, name, function in changed:
            setattr(module, name, function)


def _meet(stop: Stop, kind: str, ranks: Sequence[int], key: str, where: str) -> None:
    absent = [rank for rank in ranks if rank not in stop.present]
    if absent:
        raise _refused(kind, where, f"ranks {absent} do not stand at this line")
    stop.wire.put(f"{key}/{stop.rank}", kind)
    until = time.monotonic() + MEETING_SECONDS
    pause = 0.001
    while True:
        why, all_there = None, True
        for other in ranks:
            if other == stop.rank:
                continue
            through = stop.has_executed(other)  # looked at before its word: who gave it may be through since
            said = stop.wire.get(f"{key}/{other}")
            all_there &= said == kind
            if said == kind:
                continue
            if said is not None:
                why = f"rank {other} {said}" if said == _GAVE_UP else f"rank {other} is in {said}"
            elif through:
                why = f"rank {other} has executed the command without it"
            elif stop.gone(other):
                why = f"rank {other} is gone"
            elif time.monotonic() > until:
                why = f"rank {other} did not come to it within {MEETING_SECONDS:g} s"
            break
        if all_there:
            return
        if why is not None:
            stop.wire.put(f"{key}/{stop.rank}", _GAVE_UP)
            raise _refused(kind, where, why)
        wait(pause)
        pause = min(2 * pause, 0.05)


def _refused(kind: str, where: str, why: str) -> CommunicationError:
    return CommunicationError(
        "breakpoint",
        f"{kind}{where} was not begun: {why}",
        (),
        [
            ("x.to_local()", "this rank's part: no communication"),
            ("the same expression on all ranks, all at the same line", ""),
        ],
    )
