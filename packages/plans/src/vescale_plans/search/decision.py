"""A decision in the field's terms: throughput, utilisation, time with its band, where axes lie, schedule.

One list of rows, which text and page both print, and what another choice would have lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from typing import Any

from .._plan.table import amount
from .candidates import Candidate
from .pricer import Estimate, Pricer, Request
from .ranking import rank
from .refusals import InfeasibleError, nothing_legal

BAND = (0.09, 0.25)
"""Error of a step's time by data sheets: what half, and nine of ten, of 399 published runs on A100, H100, H200, B200
and GB200 were within before they had been seen (`benchmarks/planning/published_blind.py`: ten reports, each under
constants of its day). Nothing is said of a run unlike them."""
UNITS = ("", "K", "M", "B", "T")


def number(value: float) -> str:
    """Three digits and a unit of thousands: 24.7K, 7.24B."""
    at = 0
    while abs(value) >= 999.5 and at + 1 < len(UNITS):
        value, at = value / 1000, at + 1
    return f"{value:.3g}{UNITS[at]}"


def seconds(value: float) -> str:
    """Formats seconds with a unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value * 1e6:.3g} us"


def operations(request: Request) -> float:
    """Multiplications and additions that a step of the model itself takes, forward and backward, whoever does them:
    nothing that is computed again counts. Attention as if every position met every other."""
    structure, rows = request.structure, request.batch * request.seq
    chosen = {name: one.chosen for one in structure.experts for name in one.parameters}
    per_position = sum(one.inward * one.outward * chosen.get(one.parameter, 1) for one in structure.matrices)
    meeting = sum(group.features for group in structure.groups if group.positions_meet)
    return 6 * rows * (per_position + 2 * request.seq * meeting)


@dataclass(frozen=True)
class Run:
    """A training on so many positions: steps, time, money.

    Arguments:
        candidate: what is trained by.
        steps, days, device_hours: of the whole run, by formula.
        cost: by the price of a device hour, in its currency; None without a price.
    """

    candidate: Candidate
    steps: int
    days: float
    device_hours: float
    cost: float | None


def run_of(request: Request, one: Estimate, positions: float, price: float | None = None) -> Run:
    """Returns what a run of an estimate takes."""
    steps = ceil(positions / (request.batch * request.seq))
    hours = one.cost.total * steps / 3600
    devices = hours * request.world_size
    return Run(one.candidate, steps, hours / 24, devices, None if price is None else price * devices)


def facts(
    request: Request, chosen: Estimate, peak: int | None = None, priced: float | None = None
) -> Iterator[tuple[str, str]]:
    """(what, how much) of the choice; `peak` and `priced` are bytes and seconds of its dry run."""
    total, ranks, positions = chosen.cost.total, request.world_size, request.batch * request.seq
    hardware = request.hardware.joining(ranks)
    half, most = BAND
    yield "computes in", str(request.dtype).removeprefix("torch.")
    dry = "" if priced is None else f"; {seconds(priced)} by predict, {priced / total - 1:+.0%}, operator by operator"
    yield "a step", f"{seconds(total)}; {seconds(total * (1 - most))} to {seconds(total * (1 + most))} is the band{dry}"
    yield "the band", (
        f"{most:.0%} either way: nine of ten of 399 published runs were within it before they had been seen, half "
        f"within {half:.0%}"
    )
    if total > 0:
        yield "positions", f"{number(positions / total)} a second, {number(positions / total / ranks)} of each rank"
        done = operations(request) / total / ranks
        of = f", {done / hardware.peak:.1%} of the data sheet's peak (MFU)" if hardware.peak else ""
        yield "model operations", f"{number(done)} a second and rank{of}, nothing computed again counted"
    if peak is None:
        yield "memory", headroom(request, chosen.memory.total)
    else:
        short = f"{amount(chosen.memory.total)}, {chosen.memory.total / peak - 1:+.0%}"
        yield "memory", f"{headroom(request, peak)}; in a dry run, by formula {short}"
    hour = 3600 * positions / total if total > 0 else 0.0
    yield "device hours", f"{ranks * 1e9 / hour:,.4g} for 1B positions" if hour else "none"
    yield from places(request, chosen.candidate)
    yield "schedule", schedule(chosen)
    if chosen.candidate.offload and hardware.host_link is not None:
        link = f"{hardware.host_link / 1e9:.3g} GB/s to it"
        share = chosen.cost.optimizer / total if total else 0.0
        yield "offload", f"the optimizer's states in host memory, {link}: stepping takes {share:.0%} of the step"


def headroom(request: Request, size: float) -> str:
    free = request.limit - size
    kept = request.hardware.memory - request.limit
    beside = f"; beside it {amount(kept)} for the allocator and the communication library" if kept > 0 else ""
    what = "free" if free >= 0 else "missing"
    parts = [amount(size), amount(request.limit), amount(abs(free))]
    if all(part.endswith(" GiB") for part in parts):
        parts[0], parts[2] = (part.removesuffix(" GiB") for part in parts[::2])
    return f"{parts[0]} of {parts[1]}, {parts[2]} {what}{beside}"


def places(request: Request, candidate: Candidate) -> Iterator[tuple[str, str]]:
    """Yields each axis's place: its ranks' distance, and whether a group of it has ranks in two nodes."""
    hardware, stride = request.hardware.joining(candidate.ranks), 1
    for name, size in reversed(candidate.mesh.items()):
        if size > 1:
            far = hardware.crosses(stride, size)
            link = hardware.across if far else hardware.inside
            where = f"crosses boundaries of nodes of {hardware.node}" if far else "inside a node"
            links = hardware.links(stride, size) if far else 1
            each = f"{links} links of a node, {link.bandwidth / 1e9:.3g} GB/s each"
            alone = f"{link.bandwidth / 1e9:.3g} GB/s a rank"
            yield f"axis {name}", f"{size} ranks {stride} apart, {where}: {each if links > 1 else alone}"
        stride *= size


def schedule(chosen: Estimate) -> str:
    one, cost = chosen.candidate, chosen.cost
    if one.pp == 1:
        return f"{one.microbatches} backwards a step" if one.microbatches > 1 else "one forward, one backward"
    waits = cost.pipeline / cost.total if cost.total else 0.0
    kind = f"1F1B, {one.pp} stages"
    if one.virtual > 1:
        kind = f"interleaved 1F1B, {one.pp} ranks with {one.virtual} stages each"
    return f"{kind}, {one.microbatches} microbatches; {waits:.0%} of the step is waiting and transfers"


@dataclass(frozen=True)
class Against:
    """The choice, and the best of what was asked for instead.

    Arguments:
        request: what was asked.
        pin: what was asked for instead.
        chosen, other: priced alike; `other` with the least that fits computed again, or, where it does not fit, all.
        peak: bytes of `other` in a dry run, for which it was passed over.
    """

    request: Request
    pin: Mapping[str, Any]
    chosen: Estimate
    other: Estimate
    peak: int | None = None

    @property
    def fits(self) -> bool:
        return self.peak is None and self.other.memory.total <= self.request.limit

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """Terms of which the other takes more, in seconds (less is negative), the most first."""
        own, best = asdict(self.other.cost), asdict(self.chosen.cost)
        changes = ((name, own[name] - best[name]) for name in own)
        return tuple(sorted(((name, more) for name, more in changes if more), key=lambda one: -one[1]))

    def __str__(self) -> str:
        own, best = self.other.cost.total, self.chosen.cost.total
        asked = ", ".join(f"{name}={value}" for name, value in self.pin.items())
        lines = [f"chosen: {self.chosen.candidate}", f"instead, with {asked}: {self.other.candidate}"]
        if self.other.candidate == self.chosen.candidate:
            return "\n".join([*lines, "that is the choice"])
        lines.append(f"a step: {seconds(own)} against {seconds(best)}, {own / best - 1:+.1%}")
        lines += [f"  {name}  {'+' if lost > 0 else '-'}{seconds(abs(lost))}" for name, lost in self.losses]
        lines.append(f"memory: {headroom(self.request, self.other.memory.total)}")
        sizes, ours = asdict(self.other.memory), asdict(self.chosen.memory)
        more = {name: sizes[name] - ours[name] for name in sizes if sizes[name] != ours[name]}
        lines += [f"  {name}  {amount(size, '+')}" for name, size in more.items()]
        lines += [f"{name}: {where}" for name, where in places(self.request, self.other.candidate)]
        if self.peak is not None:
            lines.append(f"in a dry run: {headroom(self.request, self.peak)}")
        verdict = "it does not fit" if not self.fits else "it fits, and is no faster" if own >= best else "it is faster"
        return "\n".join([*lines, verdict])


def against(request: Request, chosen: Estimate, pin: Mapping[str, Any]) -> Against:
    """Prices the best candidate with these settings, beside those that were pinned anyway.

    Raises InfeasibleError where no candidate has them, PlanError for a name that is none.
    """
    asked = replace(request, pin={**(request.pin or {}), **pin})
    try:
        other = rank(asked)[0]
    except InfeasibleError:
        legal = asked.candidates()
        if not legal:
            raise nothing_legal(asked) from None
        other = _lightest(asked, legal)
    return Against(request, dict(pin), chosen, other)


def _lightest(request: Request, legal: list[Candidate]) -> Estimate:
    """Returns the candidate that needs the least, of those that do not fit."""
    pricer = Pricer(replace(request, limit=inf))
    held = ((memory.total, one) for one in legal if (memory := pricer.least(one)) is not None)
    _, candidate = min(held, default=(0, legal[0]))
    return pricer.exactly(candidate, whole=True) or pricer.evenly(candidate)
