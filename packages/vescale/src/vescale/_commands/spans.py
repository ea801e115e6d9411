"""Joins the spans of all ranks: exposed collectives, who came last, a pipeline's actions as simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from vescale_pipeline import Action, Costs, Schedule, ScheduleError, simulate, verify

Span = Mapping[str, Any]
Spans = Mapping[int, Sequence[Span]]


class Lost(NamedTuple):
    """Seconds of one rank.

    communicating: in collectives; of collectives under way at once, each counts.
    exposed: of these, what no module's work ran beside.
    waiting: between the rank's own begin of a collective and that of the last rank that takes part.
    last: how many collectives this rank was the last to begin, of `met` that others took part in.
    """

    communicating: float
    exposed: float
    waiting: float
    last: int
    met: int


def exposed(collective: Span, compute: Sequence[Span]) -> float:
    """Seconds of a collective while which no module ran from begin to end: what began before it waits for it."""
    start, end = collective["start"], collective["end"]
    inside = sorted((one["start"], one["end"]) for one in compute if one["start"] >= start and one["end"] <= end)
    hidden, until = 0.0, start
    for begin, stop in inside:
        hidden += max(0.0, stop - max(begin, until))
        until = max(until, stop)
    return end - start - hidden


def met(ranks: Spans) -> list[dict[int, Span]]:
    """The collectives that several ranks took part in, by rank: the n-th of one kind, axes and line on each."""
    found: dict[tuple, dict[int, Span]] = defaultdict(dict)
    for rank, spans in ranks.items():
        counts: dict[tuple, int] = defaultdict(int)
        for span in _lane(spans, "collectives"):
            about = span["about"]
            key = (span["name"], str(about.get("axes")), str(about.get("line")), about.get("direction"))
            counts[key] += 1
            found[(*key, counts[key])][rank] = span
    return [one for one in found.values() if len(one) > 1]


def lost(ranks: Spans) -> dict[int, Lost]:
    """By rank."""
    waiting, last, times = defaultdict(float), defaultdict(int), defaultdict(int)
    for together in met(ranks):
        latest = max(together, key=lambda rank: together[rank]["start"])
        last[latest] += 1
        for rank, span in together.items():
            times[rank] += 1
            waiting[rank] += max(0.0, min(together[latest]["start"], span["end"]) - span["start"])
    made = {}
    for rank, spans in ranks.items():
        compute, collectives = _lane(spans, "compute"), _lane(spans, "collectives")
        inside = sum(one["end"] - one["start"] for one in collectives)
        bare = sum(exposed(one, compute) for one in collectives)
        made[rank] = Lost(inside, bare, waiting[rank], last[rank], times[rank])
    return made


def straggler(ranks: Spans) -> str:
    """The rank that most others wait for, in words; empty where nobody stands out."""
    found = lost(ranks)
    if len(found) < 2 or not any(one.met for one in found.values()):
        return ""
    slowest = max(found, key=lambda rank: found[rank].last)
    others = sum(one.waiting for rank, one in found.items() if rank != slowest)
    of = found[slowest]
    if of.last * len(found) <= 1.5 * of.met:  # no more often than by chance
        return ""
    return f"rank {slowest} came last to {of.last} of {of.met} collectives; the others waited {1e3 * others:.2f} ms"


def ideal(ranks: Spans) -> dict[int, list[Span]]:
    """The pipeline's actions as the schedule would have them run at the medians of what each stage took, with nothing
    to wait for but each other; of the first rank of each stage. Empty where no pipeline was recorded whole."""
    lanes = {rank: _lane(spans, "pipeline") for rank, spans in ranks.items()}
    lanes = {rank: spans for rank, spans in lanes.items() if spans and all("kind" in one["about"] for one in spans)}
    chosen: dict[int, set[int]] = {}
    for rank in sorted(lanes):
        stages = {one["about"]["stage"] for one in lanes[rank]}
        if not any(stages & taken for taken in chosen.values()):
            chosen[rank] = stages
    owners = {stage: at for at, stages in enumerate(chosen.values()) for stage in stages}
    if len(chosen) < 2 or sorted(owners) != list(range(len(owners))):
        return {}
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rank in chosen:
        for one in lanes[rank]:
            times[(one["about"]["kind"], one["about"]["stage"])].append(one["end"] - one["start"])

    def cost(kind: str, part: float) -> list[float]:
        own = [times.get((kind, stage)) for stage in range(len(owners))]
        both = [times.get(("B", stage)) for stage in range(len(owners))]
        return [median(one) if one else part * median(two) if two else 0.0 for one, two in zip(own, both)]

    actions = tuple(
        tuple(Action(one["about"]["kind"], one["about"]["stage"], one["about"]["microbatch"], one["about"]["peer"])
              for one in lanes[rank]) for rank in chosen
    )  # fmt: skip
    count = 1 + max(action.microbatch for row in actions for action in row)
    placement = tuple(owners[stage] for stage in range(len(owners)))
    schedule = Schedule(1, "recorded", len(chosen), count, len(owners), placement, actions)
    try:
        verify(schedule, transport="buffered")
        events = simulate(schedule, Costs(cost("F", 0.0), cost("I", 0.5), cost("W", 0.5))).events
    except ScheduleError:  # not a whole step
        return {}
    names = list(chosen)
    made: dict[int, list[Span]] = {rank: [] for rank in names}
    for rank, action, start, end in events:
        if end > start:
            about = {"stage": action.stage, "microbatch": action.microbatch, "kind": action.kind}
            made[names[rank]].append({"lane": "ideal", "name": str(action), "start": start, "end": end, "about": about})
    return made


def _lane(spans: Sequence[Span], lane: str) -> list[Span]:
    return [one for one in spans if one["lane"] == lane]
