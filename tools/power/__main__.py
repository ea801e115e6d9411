"""Surveys the tests, runs the mutants, and tells; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from . import places
from .board import Board
from .core import choose
from .report import told

KILLERS, CPU_S = 5, 60.0
"""A mutant meets tests until so many have killed it, or so many CPU seconds are gone."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m power", description=__doc__)
    parser.add_argument("--areas", nargs="*", default=list(places.AREAS), choices={*places.AREAS, *places.PACKAGES})
    parser.add_argument("--each", type=int, default=15, help="mutants of each area or package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", default=["packages"], help="files and folders, as pytest takes them")
    parser.add_argument("--folder", type=Path, help="what is known of a commit; build/power/<commit> without it")
    parser.add_argument("--hours", type=float, default=12.0, help="CPU hours of the mutants' runs, in all")
    parser.add_argument("--tell", action="store_true", help="only the report")
    parser.add_argument("--choose", action="store_true", help="only choose the core, from what is known")
    given = parser.parse_args()
    folder = (given.folder or places.TOP / "build/power" / _commit()).absolute()
    if given.choose:
        print(choose(folder))
        return 0
    if not given.tell:
        os.chdir(places.TOP)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "tree").exists():
            places.write_tree(folder / "tree", places.drawn(given.areas, given.each, given.seed))
        _in_session(folder, given)
    print(told(folder))
    return 0


def _in_session(folder: Path, given: argparse.Namespace) -> None:
    """Starts pytest on the mutated tree, in a process whose paths begin with it."""
    if os.environ.get("VESCALE_POWER_TREE") != str(folder):
        path = [folder / "tree", *sorted(folder.glob("tree/packages/*/src")), places.TOP / "tools"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "VESCALE_POWER_TREE": str(folder)}
        command = [sys.executable, "-m", "power", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env=environment, start_new_session=True).returncode)
    drawn = [places.Place(*one) for one in json.loads((folder / "tree/places.json").read_text())]
    board = Board(folder / "board", len(drawn))
    board.switch(0)
    import pytest

    from .session import Session  # imports the tree, which reads where the board is

    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)  # of tests in ranks

    def work(session: Session) -> None:
        _survey(session, folder)
        _hunt(session, folder, drawn, given.hours * 3600)

    pytest.main(["-q", "-s", "-p", "no:cacheprovider", *given.tests], plugins=[Session(work, board)])


def _survey(session: Any, folder: Path) -> None:
    """A row per test: its CPU seconds, and the places that it reaches. A file of tests is a fork."""
    from .session import limit_of

    known = {row["test"] for row in _rows(folder / "survey.jsonl")}
    for name, tests in groupby(session.items, lambda test: test.partition("::")[0]):
        left = [test for test in tests if test not in known]
        if left:
            rows = session.run(left, folder / "fork.jsonl", [limit_of(30)] * len(left), lambda rows: True)
            _add(folder / "survey.jsonl", rows)
            print(f"{name}: {len(rows)} of {len(left)}, {sum(row['cpu'] for row in rows):.0f} s", flush=True)


def _hunt(session: Any, folder: Path, drawn: list[places.Place], seconds: float) -> None:
    """A row per mutant: the tests that killed it, those that it met, CPU seconds. Stops when all are gone."""
    from .session import limit_of

    rows = [
        row for row in _rows(folder / "survey.jsonl") if row["outcome"] == "passed" and row["test"] in session.items
    ]
    done = {row["mutant"]: row["cpu"] for row in _rows(folder / "mutants.jsonl")}
    for number, place in enumerate(drawn, 1):
        if number in done or sum(done.values()) > seconds:
            continue
        reaching = sorted((row for row in rows if number in row["reached"]), key=lambda row: row["cpu"])
        session.board.switch(number)
        found = session.run(
            [row["test"] for row in reaching],
            folder / "fork.jsonl",
            [limit_of(row["wall"]) for row in reaching],
            _goes_on,
        )
        session.board.switch(0)
        cut = reaching[len(found) : len(found) + 1] if _goes_on(found) else []  # the fork ended in it
        row = {
            "mutant": number,
            "name": place.name,
            "killers": [one["test"] for one in found if one["outcome"] == "failed"],
            "hung": [one["test"] for one in found if one["outcome"] == "hung"] + [one["test"] for one in cut],
            "met": [one["test"] for one in found],
            "reaching": len(reaching),
            "cpu": round(sum(one["cpu"] for one in found), 2),
        }
        done[number] = row["cpu"]
        _add(folder / "mutants.jsonl", [row])
        print(f"{number}/{len(drawn)} {len(row['killers'])} of {len(found)} killed {place.name}", flush=True)


def _goes_on(rows: list[dict[str, Any]]) -> bool:
    return sum(row["outcome"] == "failed" for row in rows) < KILLERS and sum(row["cpu"] for row in rows) < CPU_S


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def _add(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
