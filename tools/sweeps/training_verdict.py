"""What a training case has to show on the second device: one device's numbers, and no new wait of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sweeps.training_cases import Case, Outcome, single, train
from vescale_testkit import run_ranks


class Bounds(NamedTuple):
    """Relative: of each step's loss, and of each parameter at the end in the norm of its tensor."""

    loss: float
    parameter: float


REORDERED, EXACT = Bounds(1e-6, 1e-4), Bounds(1e-6, 0.0)


def bounds_of(case: Case) -> Bounds:
    """Parameters to the bit, where nothing is added up in another order; a loss may be told in another sum."""
    return EXACT if case.is_exact else REORDERED


def wanted_of(case: Case) -> Outcome:
    """What one CPU makes of the case; of reduced precision, what the same plan makes on gloo."""
    return (run_ranks(case.world, train, case, "cpu") if case.like_ranks else run_ranks(1, single, case))[0]


def wrong_numbers(outcomes: Sequence[Outcome], wanted: Outcome, bounds: Bounds = REORDERED) -> list[str]:
    """What the ranks have otherwise; empty where all is as wanted."""
    found, names = [], set()
    for rank, outcome in enumerate(outcomes):
        pairs = list(zip(outcome.losses, wanted.losses, strict=True))
        if not all(abs(loss - other) <= bounds.loss * abs(other) for loss, other in pairs):  # NaN is not
            found.append(f"rank {rank}: losses {outcome.losses}, not {wanted.losses}")
        names |= set(outcome.parameters)
        for name, value in outcome.parameters.items():
            expected = wanted.parameters[name]
            if not (value - expected).norm() <= bounds.parameter * expected.norm():
                found.append(f"rank {rank}: {name} is {(value - expected).norm() / expected.norm():.2g} off")
    if missing := set(wanted.parameters) - names:
        found.append(f"no rank has {', '.join(sorted(missing))}")
    return found


def waits_of(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Where a host waited in the last step: by site, on the rank that did most often."""
    sites = [outcome.waits for outcome in outcomes]
    return {site: max(found.get(site, 0) for found in sites) for site in sorted(set().union(*sites))}


def other_waits(waits: dict[str, int], known: dict[str, int]) -> dict[str, str]:
    """Sites that are not known, or no longer there, or come another number of times: "found, not known"."""
    waits, known = _however_decided(waits), _however_decided(known)
    sites = sorted(waits.keys() | known.keys())
    pairs = {site: (waits.get(site, 0), known.get(site, 0)) for site in sites}
    return {site: f"{found}, not {wanted}" for site, (found, wanted) in pairs.items() if found != wanted}


def _however_decided(waits: dict[str, int]) -> dict[str, int]:
    """One site for what runs an operator, whether or not its decision was known already, from an earlier case too."""
    found: dict[str, int] = {}
    for site, count in waits.items():
        site = site.replace("_dispatch/dispatch.py:_apply", "_dispatch/dispatch.py:dispatch")
        found[site] = found.get(site, 0) + count
    return found


_CALLERS = ("dtensor/_dispatch/fallback.py:run", "dtensor/_rules/empty.py:run")
"""What calls an operator of the model's as it is."""


def own_waits(waits: dict[str, int]) -> dict[str, int]:
    """Those of veScale: neither the model's own, nor an operator's of its, which is called as it is."""
    return {
        site: count
        for site, count in waits.items()
        if "/" in site
        and not any(caller in site.split(" < ")[0] for caller in _CALLERS)
        and "/" in site.partition("  ")[2].split(" < ")[0]
    }
