"""Which part of a large grid, or of slow tests, runs today.

A suite that runs on every change cannot run everything: each day takes another
part, within a few days all has run, and VESCALE_GRID=full runs all at once, as
``make verify`` does. VESCALE_GRID=330 runs what is due on that day of the year: what
failed then, or may fail tomorrow.
"""

import datetime
import os
import zlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


def today() -> int:
    """The day of the year whose slices run."""
    grid = os.environ.get("VESCALE_GRID", "")
    return int(grid) if grid.isdecimal() else datetime.date.today().timetuple().tm_yday


def slice_of(cases: Iterable[Any], fraction: int, *, day: int | None = None) -> list[Any]:
    """Every ``fraction``-th case, another part each day; all of them when VESCALE_GRID is "full".

    For grids too large for every run of the suite: within ``fraction`` days each
    case has run. Neighbours in ``cases`` fall on different days.

    Arguments:
        fraction: a slice holds one case in so many.
        day: stands in for the day of the year.
    """
    cases = list(cases)
    if os.environ.get("VESCALE_GRID") == "full":
        return cases
    day = today() if day is None else day
    return cases[day % fraction :: fraction]


def in_turns(fraction: int, *, day: int | None = None) -> Callable[[Test], Test]:
    """Decorate a slow test, above its other marks, to run ``slice_of`` its cases each day.

    Of several ``parametrize`` marks the one with the most cases is cut. A test
    without cases, or with fewer than ``fraction`` of them, is skipped on the days
    on which nothing of it has its turn, and says so. Tests begin their turns on
    different days, by a hash of their name, so that days are about equally long.

    Arguments:
        fraction: one case in so many runs on a day.
        day: stands in for the day of the year.
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
