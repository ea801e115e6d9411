"""Chooses the part of a large grid, or of slow tests, that runs.

A suite that runs on every change cannot run everything: it takes one part, the same every
time, and VESCALE_GRID=full runs all, as ``make verify`` does. The parts are numbered like
the days of a year: VESCALE_GRID=330 runs that of day 330.
"""

import os
import zlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


DAY = 332
"""The part that runs where VESCALE_GRID names none."""


def today() -> int:
    """Returns the number of the part that runs: VESCALE_GRID if that is a number, else `DAY`."""
    grid = os.environ.get("VESCALE_GRID", "")
    return int(grid) if grid.isdecimal() else DAY


def slice_of(cases: Iterable[Any], fraction: int, *, day: int | None = None) -> list[Any]:
    """Returns every ``fraction``-th case, from the one that the day says; all of them when VESCALE_GRID is "full".

    For grids too large for every run of the suite. Neighbours in ``cases`` fall on different days.

    Arguments:
        fraction: a slice holds one case in so many.
        day: stands in for `today`.
    """
    cases = list(cases)
    if os.environ.get("VESCALE_GRID") == "full":
        return cases
    day = today() if day is None else day
    return cases[day % fraction :: fraction]


def in_turns(fraction: int, *, day: int | None = None) -> Callable[[Test], Test]:
    """Decorate a slow test, above its other marks, to run ``slice_of`` its cases.

    Of several ``parametrize`` marks the one with the most cases is cut. A test
    without cases, or with fewer than ``fraction`` of them, is skipped on the days
    on which nothing of it has its turn, and says so. Tests begin their turns on
    different days, by a hash of their name, so that days are about equally long.

    Arguments:
        fraction: one case in so many runs.
        day: stands in for `today`.
    """
    import pytest

    def decorate(test: Test) -> Test:
        shift = zlib.crc32(f"{test.__module__}.{test.__qualname__}".encode())
        turn = shift + (today() if day is None else day)
        marks = list(getattr(test, "pytestmark", []))
        grids = {at: list(mark.args[1]) for at, mark in enumerate(marks) if mark.name == "parametrize"}
        longest = max(grids, key=lambda at: len(grids[at]), default=None)
        if longest is None:
            cases = slice_of([test], fraction, day=turn)
        else:
            mark, at = marks[longest], range(len(grids[longest]))
            kept = slice_of(at, fraction, day=turn)
            cases = [grids[longest][i] for i in kept]
            named = dict(mark.kwargs)
            if isinstance(named.get("ids"), (list, tuple)):
                named["ids"] = [named["ids"][i] for i in kept]
            marks[longest] = pytest.mark.parametrize(mark.args[0], cases, **named).mark
        if cases:
            test.pytestmark = marks  # type: ignore[attr-defined]
            return test
        return pytest.mark.skip(reason=f"has its turn on one day in {fraction}; VESCALE_GRID=full runs all")(test)

    return decorate
