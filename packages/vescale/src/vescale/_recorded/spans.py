"""Joins the spans of all ranks: exposed collectives, who came last, and who waited for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
    """The collectives that several ranks took part in, by rank: the n-th of one kind, axes, ranks and line on each."""
    found: dict[tuple, dict[int, Span]] = defaultdict(dict)
    for rank, spans in ranks.items():
        counts: dict[tuple, int] = defaultdict(int)
        for span in _lane(spans, "collectives"):
            about = span["about"]
            key = (span["name"], *(str(about.get(name)) for name in ("axes", "ranks", "line", "direction")))
            counts[key] += 1
            found[(*key, counts[key])][rank] = span
    return [one for one in found.values() if len(one) > 1]


class Wait(NamedTuple):
    """What a rank had begun, and for how many seconds nothing came of it, until the last rank began it too."""

    rank: int
    latest: int
    span: Span
    seconds: float


def waits(ranks: Spans) -> Iterator[Wait]:
    """Yields the waits of all ranks, that of the last one too, which is zero."""
    for together in met(ranks):
        latest = max(together, key=lambda rank: together[rank]["start"])
        for rank, span in together.items():
            yield Wait(rank, latest, span, max(0.0, min(together[latest]["start"], span["end"]) - span["start"]))


def waited(ranks: Spans) -> Iterator[str]:
    """Yields, in words, for which rank each one waited longest in all, and in which collective the most."""
    by: dict[int, dict[int, list[Wait]]] = defaultdict(lambda: defaultdict(list))
    for one in waits(ranks):
        by[one.rank][one.latest].append(one)
    for rank, found in sorted(by.items()):
        latest, all_of = max(found.items(), key=lambda row: sum(one.seconds for one in row[1]))
        seconds, most = sum(one.seconds for one in all_of), max(all_of, key=lambda one: one.seconds)
        about = most.span["about"]
        where = ", ".join(str(one) for one in (most.span["name"], about.get("module"), about.get("line")) if one)
        if seconds:
            yield f"rank {rank} waited {1e3 * seconds:.2f} ms for rank {latest}, {1e3 * most.seconds:.2f} ms in {where}"


def lost(ranks: Spans) -> dict[int, Lost]:
    """Returns the lost seconds by rank."""
    waiting, last, times = defaultdict(float), defaultdict(int), defaultdict(int)
    for one in waits(ranks):
        last[one.rank] += one.rank == one.latest
        times[one.rank] += 1
        waiting[one.rank] += one.seconds
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
