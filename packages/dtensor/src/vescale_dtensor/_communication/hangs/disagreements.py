"""Finds what ranks that hang disagree about: pure comparisons of what each was in (`hang.py`).

Three things are compared, per group of ranks (`flight_recorder.RankGroup`): collectives and ordered transfers by their
numbers, of which the same must be the same everywhere; and messages, which are known by their names, by who posted
them. What counts most comes first: what two ranks see differently, or one of them has passed by; then what somebody
waits for whose other end does not wait for anything itself; then what waits in a chain, the oldest first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from .. import flight_recorder
from .words import named_ranks as _ranks

Report = Mapping[str, Any]
Known = Mapping[int, Mapping[int, dict]]
"""Communications of a group of ranks: rank -> number -> event."""
_MOST = 3  # that are told


def compared(reports: Mapping[int, Report], size: int, last_seen: str = "") -> str:
    """Names the ranks that disagree, and the communication since which they do. `last_seen`: where those were that have
    no report."""
    reports = dict(sorted(reports.items()))  # every rank begins with its own, and all are to say the same
    found = [text for _, text in sorted(_disagreements(reports), key=lambda one: one[0])]
    silent = [rank for rank in range(size) if rank not in reports]
    found = found[: _MOST - bool(silent)]
    if silent:
        found.append(f"{_ranks(silent)} did not answer: gone, or stopped{last_seen}")
    alone = _calls_of_their_own(reports)
    if alone:
        found = [alone, *found[: _MOST - 1], *_last_common(reports)]
    if found:
        return "; ".join(found)
    return "all ranks are at the same communication of every axis: a lost connection?"


def _calls_of_their_own(reports: Mapping[int, Report]) -> str:
    """Calls of torch.distributed that the user made, of which no numbers are known; "" where all are in the same."""
    calls = {rank: "" if one["waiting"] else one.get("call", "") for rank, one in reports.items()}
    if not any(calls.values()):
        return ""
    places: dict[str, list[int]] = {}
    for rank, one in reports.items():
        places.setdefault(f"in {calls[rank]}, at {_place(one)}" if calls[rank] else f"at {_place(one)}", []).append(
            rank
        )
    return " and ".join(f"{_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} {at}" for at, ranks in places.items())


def _last_common(reports: Mapping[int, Report]) -> Iterator[str]:
    """Yields the last communication that all ranks have come to."""
    events = [{(e["key"], e["number"]): e for e in one["events"]} for one in reports.values()]
    common = set.intersection(*map(set, events)) if events else set()
    last = min((events[0][one] for one in common), key=lambda e: e["seconds_ago"], default=None)
    if last is not None:
        axis = ", ".join(map(repr, last["axes"]))
        yield f"all have come to {last['of']} {last['number']} over axis {axis} ({last['kind']}, {last['cause']})"


def _disagreements(reports: Mapping[int, Report]) -> Iterator[tuple[tuple, str]]:
    """(order of importance, text) per group of ranks that disagree."""
    groups: dict[str, dict[int, list[dict]]] = defaultdict(dict)  # key -> rank -> events
    for rank, one in reports.items():
        for event in one["events"]:
            groups[event["key"]].setdefault(rank, []).append(event)
    for by_rank in groups.values():
        event = next(iter(by_rank.values()))[0]
        of, axis = event["of"], ", ".join(map(repr, event["axes"]))
        members = {rank: by_rank.get(rank, []) for rank in event["ranks"] if rank in reports}
        if of == flight_recorder.MESSAGES:
            yield from _unanswered(reports, members, axis)
        else:
            yield from _out_of_step(reports, members, of, axis)


def _unanswered(reports: Mapping[int, Report], members: Mapping[int, list[dict]], axis: str) -> Iterator:
    """Messages that one end waits for and the other has not posted; first, where that has posted others instead."""
    posted = {rank: {event["kind"]: event["number"] for event in events} for rank, events in members.items()}
    for rank, events in members.items():
        for other in members:
            for event in events if other != rank else ():
                if event["state"] != flight_recorder.WAITING or event["kind"] in posted[other]:
                    continue
                instead = [  # what comes after it, here
                    one["kind"]
                    for one in members[other]
                    if one["way"] == event["way"] and one["call"] == event["call"]
                    if posted[rank].get(one["kind"], event["number"] + 1) > event["number"]
                ]
                passed = f"has passed it by, to {instead[-1]}" if instead else "has not come to it"
                text = (
                    f"rank {rank} waits over axis {axis} for {event['kind']}, at {_place(reports[rank])}, and rank "
                    f"{other} {passed}: it is at {_place(reports[other])}"
                )
                order = 0 if instead else 1 + bool(reports[other]["waiting"])
                yield (order, -event["seconds_ago"]), text


def _out_of_step(reports: Mapping[int, Report], members: Mapping[int, list[dict]], of: str, axis: str) -> Iterator:
    """Yields numbers that are not the same communication on all ranks, or that not everybody has come to."""
    known = {rank: {event["number"]: event for event in events} for rank, events in members.items()}
    odd = _first_odd(known)
    if odd is not None:
        said = " and ".join(
            f"{_ranks(who)} in {kind}, asked for by {_asked(reports, known, who[0], odd)}"
            for kind, who in _by(known, odd).items()
        )
        yield (0, odd), f"{of} {odd} over axis {axis} is not the same on all ranks: {said}"
        return
    last = {rank: max(events, default=0) for rank, events in known.items()}
    least, most = min(last.values()), max(last.values())
    if least == most:
        return
    behind = [rank for rank in members if last[rank] < most]
    ahead = [rank for rank in members if last[rank] == most]
    number = least + 1
    shown = next((rank for rank in ahead if number in known[rank]), ahead[0])
    event = known[shown].get(number, known[shown][most])
    waits = any(reports[rank]["waiting"] for rank in behind)
    reached = f"come to {least}" if least else f"none over it among the last {flight_recorder.EVENTS}"
    text = (
        f"{_ranks(ahead)} {'are' if len(ahead) > 1 else 'is'} at {of} {event['number']} over axis {axis} "
        f"({event['kind']}, asked for by {_asked(reports, known, shown, event['number'])}), {_ranks(behind)} "
        f"{'have' if len(behind) > 1 else 'has'} {reached}, at {_place(reports[behind[0]])}"
    )
    yield (1 + waits, number if of == flight_recorder.COLLECTIVES else -event["seconds_ago"]), text


def _first_odd(known: Known) -> int | None:
    """The first that is of another kind on some rank."""
    numbers = sorted({number for events in known.values() for number in events})
    return next((number for number in numbers if len(_by(known, number)) > 1), None)


def _by(known: Known, number: int) -> dict[str, list[int]]:
    kinds: dict[str, list[int]] = {}
    for rank, events in known.items():
        if number in events:
            kinds.setdefault(events[number]["kind"], []).append(rank)
    return kinds


def _asked(reports: Mapping[int, Report], known: Known, rank: int, number: int) -> str:
    event = known[rank][number]
    waits = event["state"] == flight_recorder.WAITING
    return f"{event['cause']} at {_place(reports[rank])}" if waits else event["cause"]


def _place(one: Report) -> str:
    return one["lines"][0] if one["lines"] else "no line of the user's"
