"""All that was weighed for a plan: every candidate in closed form, the best exactly, and what binds each of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from .._plan.table import amount
from .candidates import Candidate
from .decision import Run, facts, number, run_of
from .pricer import Estimate, Pricer, Request

FULL = 0.9
"""Share of the memory limit, from which on memory is said to bind."""


@dataclass(frozen=True)
class Priced:
    """A candidate in closed form, with blocks dealt out evenly: a point of time against memory."""

    candidate: Candidate
    seconds: float
    bytes: int
    fits: bool


@dataclass(frozen=True)
class Weighed:
    """See the module.

    Arguments:
        request: what was asked.
        ranked: the choice, and the next best.
        demoted: what was faster by formula, and took so many bytes in a dry run.
        peak: bytes of the choice in a dry run, where one was asked for.
        seconds: of a step of that dry run, as `predict` prices it; None for a pipeline.
    """

    request: Request
    ranked: Sequence[Estimate]
    demoted: Sequence[tuple[Candidate, int]] = ()
    peak: int | None = None
    seconds: float | None = None

    def runs(self, positions: float, price: float | None = None) -> tuple[Run, ...]:
        """Returns what training on so many positions takes, by the choice and by the next best.

        Arguments:
            price: of a device hour, in any currency.
        """
        return tuple(run_of(self.request, one, positions, price) for one in self.ranked)

    @property
    def chosen(self) -> Estimate:
        return self.ranked[0]

    @cached_property
    def priced(self) -> tuple[Priced, ...]:
        """Every candidate that the request allows, in closed form."""
        pricer = Pricer(self.request)
        points = []
        for one in self.request.candidates():
            rough = pricer.evenly(one)
            size = rough.memory.total
            points.append(Priced(one, rough.cost.total, size, size <= self.request.limit))
        return tuple(points)

    @property
    def front(self) -> tuple[Priced, ...]:
        """Returns those that no other beats in both time and memory; fastest first."""
        front: list[Priced] = []
        for point in sorted(self.priced, key=lambda one: (one.seconds, one.bytes, one.candidate)):
            if not front or point.bytes < front[-1].bytes:
                front.append(point)
        return tuple(front)

    def binds(self, estimate: Estimate) -> str:
        """Names what keeps an estimate from being faster: memory, and what it spends time on besides computing."""
        parts = []
        if self.request.limit and estimate.memory.total > FULL * self.request.limit:
            parts.append(f"memory {estimate.memory.total / self.request.limit:.0%} full")
        terms = {name: value for name, value in asdict(estimate.cost).items() if name != "compute"}
        name = max(terms, key=lambda one: terms[one])
        parts.append(f"{name} {terms[name] / estimate.cost.total:.0%} of the step")
        return ", ".join(parts)

    def loses(self, estimate: Estimate) -> str:
        """Says where an estimate is worse than the choice."""
        if estimate is self.chosen:
            return ""
        if self.request.objective == "memory":
            return amount(estimate.memory.total - self.chosen.memory.total, "+")
        own, best = asdict(estimate.cost), asdict(self.chosen.cost)
        name = max(own, key=lambda one: own[one] - best[one])
        more = estimate.cost.total - self.chosen.cost.total
        return f"{more:+.3g} s, {name} {own[name] - best[name]:+.3g} s" if more else "a tie, broken by memory and order"

    def headline(self) -> list[str]:
        """The request and the choice, in a few lines."""
        asked, best = self.request, self.chosen
        fit = sum(one.fits for one in self.priced)
        dry = [f"demoted: {one}, {amount(size)} in a dry run" for one, size in self.demoted]
        return [
            f"{number(asked.structure.parameters)} parameters on {asked.world_size} x {asked.hardware.name}, "
            f"{asked.batch} rows of {asked.seq} positions in {str(asked.dtype).removeprefix('torch.')}, "
            f"for the least {asked.objective}",
            f"chosen: {best.candidate}",
            *(f"{name}: {value}" for name, value in facts(asked, best, self.peak, self.seconds)),
            f"binds: {self.binds(best)}",
            f"{len(self.priced)} candidates, {fit} of which fit with blocks dealt out evenly",
            *dry,
        ]
