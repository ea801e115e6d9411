"""The ratios that the project promises, each measured in one race, with its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from timeit import Timer

from benchmarks.cases import _block_cases, _dispatch_cases
from benchmarks.cases._pairwise import Race, race

VESCALE = "veScale"


@dataclass(frozen=True)
class Headline:
    """veScale over `floor`, at most `budget`; the other contenders are there to compare with."""

    name: str
    floor: str
    budget: float | None
    race: Race
    missing: dict[str, str]  # contender -> why it did not run
    collectives: dict[str, int]  # per call, where the case communicates

    @property
    def met(self) -> bool:
        """A budget that was not measured is not met."""
        if self.budget is None:
            return True
        return VESCALE in self.race.seconds and self.ratio(VESCALE) <= self.budget

    def ratio(self, name: str) -> float:
        return self.race.ratio(name, self.floor).median

    def as_json(self) -> dict:
        contenders = {}
        for name in self.race.seconds:
            found = self.race.ratio(name, self.floor)
            contenders[name] = {
                "ratio": round(found.median, 4),
                "quartiles": [round(found.lower, 4), round(found.upper, 4)],
                "rounds": found.rounds,
                "us": round(self.race.microseconds(name), 3),
            }
        return {
            "name": self.name,
            "floor": self.floor,
            "budget": self.budget,
            "met": self.met,
            "contenders": contenders,
            "missing": self.missing,
            "collectives": self.collectives,
        }


def dispatch(mesh, *, rounds: int = 300) -> Iterator[Headline]:
    """One operator on 4x4 tensors, case by case."""
    for case in _dispatch_cases.CASES:
        yield dispatch_of(case, mesh, rounds=rounds)


def dispatch_of(case: _dispatch_cases.Case, mesh, *, rounds: int = 300) -> Headline:
    ready, missing = _make_ready(_dispatch_cases.contenders(case, mesh))
    return Headline(case.name, case.floor, case.budget, race(ready, rounds=rounds), missing, {})


def blocks(mesh, *, rounds: int = 150) -> Headline:
    """Four Llama blocks under tensor and sequence parallelism, forward and backward."""
    ready, missing = _make_ready(_block_cases.contenders(mesh))
    collectives = {name: _block_cases.collectives(step) for name, step in ready.items()}
    # `calls=1`: gradients are dropped before every step, outside its time.
    found = race(ready, rounds=rounds, calls=1)
    name, floor = "4 Llama blocks, both ways, TP+SP=8", _block_cases.BY_HAND
    return Headline(name, floor, _block_cases.BUDGET, found, missing, collectives)


def _make_ready(contenders) -> tuple[dict[str, Timer], dict[str, str]]:
    """Those that ran once, and why the others did not.

    A veScale that cannot run a case is a finding; a baseline that cannot is a bug of this suite.
    """
    ready, missing = {}, {}
    for name, make in contenders.items():
        try:
            contender = make()
            contender.timeit(1)
        except Exception as error:
            if name != VESCALE:
                raise
            missing[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        else:
            ready[name] = contender
    return ready, missing
