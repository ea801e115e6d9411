"""Joins the spans of all ranks: exposed collectives, and who came last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    """Returns the lost seconds by rank."""
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
    """The rank that most others wait for, in words; empty if nobody stands out."""
    found = lost(ranks)
    if len(found) < 2 or not any(one.met for one in found.values()):
        return ""
    slowest = max(found, key=lambda rank: found[rank].last)
    others = sum(one.waiting for rank, one in found.items() if rank != slowest)
    of = found[slowest]
    if of.last * len(found) <= 1.5 * of.met:  # no more often than by chance
        return ""
    return f"rank {slowest} came last to {of.last} of {of.met} collectives; the others waited {1e3 * others:.2f} ms"


def _lane(spans: Sequence[Span], lane: str) -> list[Span]:
    return [one for one in spans if one["lane"] == lane]
