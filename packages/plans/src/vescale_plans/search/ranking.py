"""Ranking: every candidate priced, those that fit in order, the best of them with their exact cut."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from .candidates import Candidate
from .pricer import Estimate, Pricer, Request
from .progress import Bar
from .refusals import nothing_legal, over_memory_by_formula

MARGIN = 0.94
"""Share of a device's memory that a plan may fill: the allocator and the communication library want the rest."""
KEPT = 6
"""Estimates that are made exactly: the choice, and the next five."""

RANKING = "pricing candidates"


def rank(request: Request, bar: Bar | None = None) -> list[Estimate]:
    """Exact branch and bound: candidates in the order of what no cut of theirs is below, until KEPT are known that
    the next cannot beat.

    A candidate that may compute blocks again is one with the fewest such blocks, whole or of their modules those that
    are the fastest: it is left out where none is needed. With a pin, all blocks are. Only where nothing fits are
    candidates tried that keep the optimizer's states on the host.
    """
    legal = request.candidates()
    if not legal:
        raise nothing_legal(request)
    pricer, bar = Pricer(request), bar or Bar()
    pin = request.pin or {}
    whole = "checkpointing" in pin or bool(pin.get("inside")) or request.objective == "memory"
    if request.objective == "memory":
        found = [one for each in bar.over(RANKING, legal) if (one := pricer.exactly(each, whole=True)) is not None]
        best = sorted(found, key=lambda one: (one.memory.total, one.cost.total, one.candidate))[:KEPT]
    else:
        best = _fastest(pricer, legal, whole, bar)
    if best:
        return best
    if (offloading := request.offloading()) is not None:
        return rank(offloading, bar)
    raise over_memory_by_formula(request, pricer)


def _fastest(pricer: Pricer, legal: list[Candidate], whole: bool, bar: Bar) -> list[Estimate]:
    bounds = sorted((pricer.bound(one, whole=whole), one) for one in bar.over(RANKING, legal))
    best: list[tuple[float, int, Candidate, Estimate]] = []
    fitted: set[Candidate] = set()
    for bound, candidate in bounds:
        if len(best) == KEPT and bound > best[-1][0]:
            break
        if candidate in fitted or replace(candidate, checkpointing=False) in fitted:
            continue
        below = best[-1][0] if len(best) == KEPT else inf
        one = pricer.exactly(candidate, whole=whole, below=below)
        if one is not None and one.candidate not in fitted:
            fitted.add(one.candidate)
            made = (one.cost.total, one.memory.total, one.candidate, one)
            best = sorted([*best, made], key=lambda each: each[:3])[:KEPT]
    return [one for *_, one in best]
