"""The fixed core of the tests, which `make test` runs: chosen from what the meter found, the same on every day.

A test is in the core if one of these holds:

    it is cheap                  CHEAP_S
    it is the cheapest case      of its function, unless that is dear (CASE_S): each promise has one
    it is marked `core`          the case of a contract that nothing cheaper shows
    the cover takes it           tests that kill, per CPU second, most of the mutants that all these leave alive

The rest are named in `tests/beyond_the_core.txt` of their package, which `build_defs/pytest_main.py` reads. A new test
is in the core until the choice is made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .places import TOP, Place
from .report import cover

CHEAP_S, CASE_S = 0.2, 10.0
NAME = "beyond_the_core.txt"
HEAD = """\
# Tests that `make test` leaves out and `make test-all` runs: dear ones whose mutants others kill.
# Chosen by `make power CHOOSE=1`, by the rule in tools/power/core.py.
"""


def chosen(costs: Mapping[str, float], killers: list[list[str]], marked: Collection[str]) -> set[str]:
    """Returns the core.

    Arguments:
        costs: CPU seconds of each test.
        killers: of each mutant that counts in the choice, the tests that kill it.
        marked: tests with the mark.
    """
    cheapest: dict[str, str] = {}
    for test in sorted(costs, key=lambda test: (costs[test], test)):
        if costs[test] <= CASE_S:
            cheapest.setdefault(test.partition("[")[0], test)
    core = {test for test, seconds in costs.items() if seconds <= CHEAP_S or test in marked} | set(cheapest.values())
    return core | cover([tests for tests in killers if not core & set(tests)], dict(costs))


def choose(folder: Path) -> str:
    """Writes the packages' lists from a folder of the meter; returns what the core is worth, as text."""
    costs = {row["test"]: row["cpu"] for row in _rows(folder / "survey.jsonl") if row["outcome"] != "skipped"}
    drawn = [Place(*one) for one in json.loads((folder / "tree/places.json").read_text())]
    killed = [row for row in _rows(folder / "mutants.jsonl") if row["killers"]]
    counts = [row["killers"] for row in killed if not drawn[row["mutant"] - 1].is_held_out]
    held_out = [row["killers"] for row in killed if drawn[row["mutant"] - 1].is_held_out]
    core = chosen(costs, counts, _collected("-m", "core"))
    write(_collected() & costs.keys() - core)
    return (
        f"{len(core)} of {len(costs)} tests, {sum(costs[test] for test in core):.0f} of "
        f"{sum(costs.values()):.0f} CPU s; of {len(held_out)} mutants that are held out and killed by any test, "
        f"it kills {sum(bool(core & set(tests)) for tests in held_out)}"
    )


def write(beyond: set[str], top: Path = TOP) -> None:
    """Writes each package's list, and removes one of which nothing is left."""
    for folder in sorted(top.glob("packages/*/tests")):
        own = sorted(test for test in beyond if test.startswith(f"{folder.relative_to(top)}/"))
        (folder / NAME).unlink(missing_ok=True)
        if own:
            (folder / NAME).write_text(HEAD + "".join(f"{test}\n" for test in own))


def _collected(*options: str) -> set[str]:
    """The packages' tests as they are now."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, "packages"]
    listed = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=True).stdout
    return {line for line in listed.splitlines() if "::" in line}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
