"""Which trainings a place matters to, and what they say of it as a mutant."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from package_tree import read_packages
from sweeps import training_cases
from sweeps.training_cases import CASES, Case, Outcome, train
from sweeps.training_verdict import other_waits, waits_of, wanted_of, wrong_numbers
from vescale_testkit import RankError, run_ranks
from vescale_testkit.worker_pool import pool

from .effects import Helper
from .grammar import KINDS, Place, places_of
from .patched import compiled

TOP = Path(__file__).absolute().parents[2]
_MOST_PLACES = 10_000  # of a file
SECONDS = 60.0
"""A mutant that is not told within these is red: it hangs, where the second device would have told a deadlock."""


EQUIVALENT = "the same bits were sent, in the same order"
NOT_REACHED = "never reached"


class Seen(NamedTuple):
    """What a case makes of the engine's places, and what it takes."""

    effects: dict[str, dict[int, int]]  # by file, by number: 0 where it was reached without an effect
    waits: dict[str, int]
    traffic: list[list[str]]  # by rank
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `caught` is empty where nothing saw it.

    One that nothing saw is no mutant where it changes nothing: every rank sent the same bits in the same order on each
    communicator, nothing was left under way, the host waited nowhere else, and the numbers are right; or where it was
    never reached, which a survey cannot tell of what asks who else holds a tensor, for it holds some itself.
    """

    place: Place
    case: str
    caught: str
    how: str
    seconds: float

    @property
    def is_equivalent(self) -> bool:
        return not self.caught and self.how in (EQUIVALENT, NOT_REACHED)

    def as_json(self) -> dict[str, Any]:
        place = f"{self.place.file}:{self.place.line} in {self.place.function}"
        caught = self.caught or ("nothing: equivalent" if self.is_equivalent else "nothing")
        return {
            "kind": self.place.kind, "place": place, "text": self.place.text, "case": self.case,
            "caught by": caught, "how": self.how, "seconds": round(self.seconds, 1),
        }  # fmt: skip


@lru_cache(maxsize=1)
def sources() -> dict[str, Path]:
    """The engine's files: `plans/_zero/bucket.py`."""
    packages = [package for package in read_packages(TOP) if not package.is_kit]
    files = [(package, path) for package in packages for path in sorted(package.source.rglob("*.py"))]
    return {f"{package.name}/{path.relative_to(package.source).as_posix()}": path for package, path in files}


def all_places() -> dict[str, list[Place]]:
    """Of the whole engine, by file."""
    return {file: places_of(file, path.read_text()) for file, path in sources().items()}


@lru_cache(maxsize=1)
def _all_compiled() -> dict[str, bytes]:
    """By path: the helper stands everywhere; a file's places are numbered from its own number on."""
    files = enumerate(sources().values())
    return {str(path): compiled(path, path.read_text(), first=at * _MOST_PLACES) for at, path in files}


def survey(case: Case) -> Seen | str:
    """Runs the case with eyes on all places; or why it fails as it is."""
    wanted = wanted_of(case)
    began = time.monotonic()
    try:
        told = run_ranks(case.world, _surveyed, case, _all_compiled(), device="second", timeout=300)
    except RankError as error:
        return str(error)
    finally:
        pool.end(case.world, "second")
    outcomes = [one.outcome for one, _ in told]
    if wrong := wrong_numbers(outcomes, wanted):
        return wrong[0]
    effects: dict[str, dict[int, int]] = {}
    names = list(sources())
    for _, found in told:
        for number, times in found.items():
            at, place = divmod(number, _MOST_PLACES)
            mine = effects.setdefault(names[at], {})
            mine[place] = max(mine.get(place, 0), times)
    return Seen(effects, waits_of(outcomes), [one.traffic for one, _ in told], time.monotonic() - began)


def verdict(place: Place, case: Case, wanted: Outcome, seen: Seen, which: int) -> Verdict:
    """Runs the case with the mutant in it, in processes of its own."""
    began = time.monotonic()

    def judged(caught: str, how: str) -> Verdict:
        return Verdict(place, case.name, caught, how, time.monotonic() - began)

    path = sources()[place.file]
    file = {str(path): compiled(path, path.read_text(), only=place.number)}
    try:
        told = run_ranks(case.world, _mutated, case, file, which, device="second", timeout=SECONDS)
    except RankError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if any("HelperError" in line for line in lines):
            raise
        said = next((line for line in lines if _is_error(line)), lines[0])
        return judged("a hang" if "no answer within" in lines[0] else "an error", said[:240])
    finally:
        pool.end(case.world, "second")
    outcomes = [one.outcome for one, _ in told]
    if not any(visits for _, visits in told):
        return judged("", NOT_REACHED)
    if wrong := wrong_numbers(outcomes, wanted):
        return judged("the numbers", wrong[0][:240])
    if others := other_waits(waits_of(outcomes), seen.waits):
        return judged("a wait of the host", ", ".join(others)[:240])
    # What streams do to each other shows in no number here: it is an error, or was not seen.
    same = place.kind != "stream" and [one.traffic for one, _ in told] == seen.traffic
    return judged("", EQUIVALENT if same else "other bits were sent, or in another order")


def _is_error(line: str) -> bool:
    name = line.partition(":")[0].rpartition(".")[2]
    return name.isidentifier() and name.endswith(("Error", "Failure", "Exception", "Interrupt"))


class Chance(NamedTuple):
    """A place that matters, and the trainings in which it does, the quickest first."""

    place: Place
    cases: list[str]


def chances(places: Mapping[str, list[Place]], seen: Mapping[str, Seen]) -> list[Chance]:
    """The places that have an effect in a training, in the order of the sources, with these trainings."""
    found = []
    for file, of_file in places.items():
        for place in of_file:
            at = [name for name, one in seen.items() if one.effects.get(file, {}).get(place.number)]
            if at:
                found.append(Chance(place, sorted(at, key=lambda name: (CASES[name].world, seen[name].seconds, name))))
    return found


def drawn(chances: Iterable[Chance], each: int, seed: int) -> list[Chance]:
    """So many of each kind, by seed."""
    random, found = Random(seed), []
    for kind in KINDS:
        of_kind = [chance for chance in chances if chance.place.kind == kind]
        found += random.sample(of_kind, min(each, len(of_kind)))
    return found


# --- on a rank -------------------------------------------------------------------------


class Told(NamedTuple):
    """What a rank says of its training."""

    outcome: Outcome
    traffic: list[str]


def _surveyed(case: Case, files: dict[str, bytes]) -> tuple[Told, dict[int, int]]:
    from .effects import Survey
    from .patched import put, unseen

    unseen()
    helper = Survey()
    put(helper, files)
    told = _counting(case, helper)
    helper.finish()
    return told, {number: helper.effects[number] for number in helper.reached}


def _mutated(case: Case, file: dict[str, bytes], which: int) -> tuple[Told, int]:
    from .effects import Mutant
    from .patched import put, unseen

    unseen()
    helper = Mutant(which)
    put(helper, file)
    return _counting(case, helper), helper.visits


def _counting(case: Case, helper: Helper) -> Told:
    """Trains, tells the helper which step it is, and listens to what is sent."""
    from .effects import Traffic

    waits, steps = training_cases._waits, count(1)

    @contextlib.contextmanager
    def counted(device: str) -> Iterator[Any]:
        helper.step = next(steps)
        try:
            with waits(device) as found:
                yield found
        finally:
            helper.step = None

    training_cases._waits = counted
    with Traffic() as traffic:
        outcome = train(case, "second")
    return Told(outcome, traffic.digests)
