"""The power meter: mutants behind a switch, tests in forks, a cover of the kills."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from power import places
from power.board import Board
from power.core import HEAD, NAME, chosen, write
from power.report import cover

TOP = Path(__file__).absolute().parents[2]
SOURCE = '''"""Head."""
from __future__ import annotations

def f(a, b, box=3):
    if a < b and a is not None:
        box = 1
    box -= 2
    seen = [one for one in (a, b) if one == 5]
    a_list.append(box)
    return a - b, True, f"{a - 1}", seen, box
'''


def run_with(number):
    """What `f(5, 7)` returns, and the list that it fills, with one mutant on."""
    found = places.places_of("f.py", SOURCE)
    tree = places.mutated(SOURCE, {at: at + 1 for at in range(len(found))})
    source = compile(tree, "f.py", "exec")
    names = {"a_list": []}
    sys.modules["vescale_power"] = type(sys)("vescale_power")
    sys.modules["vescale_power"].is_on = lambda one: one == number
    try:
        exec(source, names)
    finally:
        del sys.modules["vescale_power"]
    return names["f"](5, 7), names["a_list"]


def test_each_place_is_a_mutant_of_its_own():
    found = places.places_of("f.py", SOURCE)
    assert [(place.kind, place.text) for place in found] == [
        ("comparison", "a < b and a is not None"),
        ("comparison", "a < b"),
        ("comparison", "a is not None"),
        ("constant", "1"),
        ("statement", "box -= 2"),
        ("constant", "2"),
        ("comparison", "one == 5"),
        ("constant", "5"),
        ("statement", "a_list.append(box)"),
        ("operands", "a - b"),
        ("constant", "True"),
    ]
    plain = (-2, True, "4", [5], -1), [-1]
    assert run_with(0) == plain
    changed = {place.text: run_with(number) for number, place in enumerate(found, 1)}
    assert changed.pop("a < b and a is not None") == changed.pop("a < b") == plain  # of these values alone
    assert changed == {
        "a is not None": ((-2, True, "4", [5], 1), [1]),
        "1": ((-2, True, "4", [5], 0), [0]),
        "box -= 2": ((-2, True, "4", [5], 1), [1]),
        "2": ((-2, True, "4", [5], -2), [-2]),
        "one == 5": ((-2, True, "4", [7], -1), [-1]),
        "5": ((-2, True, "4", [], -1), [-1]),
        "a_list.append(box)": ((-2, True, "4", [5], -1), []),
        "a - b": ((2, True, "4", [5], -1), [-1]),
        "True": ((-2, False, "4", [5], -1), [-1]),
    }


def test_every_source_takes_all_its_mutants():
    for area in places.AREAS.values():
        for path in sorted((TOP / area).rglob("*.py"))[::15]:
            source = path.read_text()
            count = len(places.places_of(str(path), source))
            compile(places.mutated(source, {at: at + 1 for at in range(count)}), str(path), "exec")


def test_defects_are_drawn_from_a_whole_package():
    found = places.drawn(["pipeline", "trace"], 3, 0)
    assert [place.file.split("/")[1] for place in found] == ["pipeline", "trace"] * 3


def test_processes_share_the_board(tmp_path, monkeypatch):
    monkeypatch.delenv("VESCALE_POWER_BOARD", raising=False)
    monkeypatch.setenv("VESCALE_POWER_BOARD", "")  # is taken back
    board = Board(tmp_path / "board", 5)
    asks = "from power.switch import is_on; print([is_on(number) for number in (2, 4)])"
    for on, said in ((0, [False, False]), (4, [False, True])):
        board.forget()
        board.switch(on)
        found = subprocess.run(
            [sys.executable, "-c", asks], cwd=TOP / "tools", capture_output=True, text=True, check=True
        )
        assert json.loads(found.stdout.lower()) == said
        assert board.reached() == [2, 4]


def test_a_cover_takes_kills_by_cpu_second():
    cost = {"slow": 9.0, "first": 1.0, "second": 1.0, "small": 0.5}
    assert cover([["slow", "first"], ["slow", "second"], ["small", "second"]], cost) == {"first", "second"}
    assert cover([["slow"], ["slow", "first"]], cost) == {"first", "slow"}  # greedy
    assert cover([], cost) == set()


def test_the_core_has_cheap_tests_a_case_of_each_function_the_marked_and_the_only_killers():
    costs = {"cheap": 0.5, "grid[1]": 8.0, "grid[2]": 7.0, "grid[3]": 9.0, "dear[1]": 30.0, "dear[2]": 31.0}
    kills = [["cheap", "grid[1]"], ["grid[3]"]]
    assert chosen(costs, kills, ()) == {"cheap", "grid[2]", "grid[3]"}
    assert chosen(costs, kills[:1], {"dear[2]"}) == {"cheap", "grid[2]", "dear[2]"}


def test_each_package_has_a_list_of_its_own(tmp_path):
    for package in ("a", "b"):
        (tmp_path / "packages" / package / "tests").mkdir(parents=True)
    lists = [tmp_path / "packages" / package / "tests" / NAME for package in ("a", "b")]
    lists[1].write_text("old")
    write({"packages/a/tests/test_it.py::test_b", "packages/a/tests/test_it.py::test_a"}, tmp_path)
    assert lists[0].read_text() == HEAD + "packages/a/tests/test_it.py::test_a\npackages/a/tests/test_it.py::test_b\n"
    assert not lists[1].exists()


def test_mutants_meet_tests_in_forks(tmp_path):
    file = "packages/dtensor/tests/values/test_layout.py"
    names = ("an_interleaved_cut_takes_its_chunk_of_every_group", "a_ragged_cut_has_the_proportions_of_its_units")
    tests = [
        f"{file}::test_{name}" for name in (*names, "a_dim_that_two_axes_shard_is_cut_twice_the_left_axis_outermost")
    ]
    command = [sys.executable, "-m", "power", "--areas", "layouts", "--each", "40", "--folder", str(tmp_path / "power")]
    environment = {**os.environ, "PYTHONPATH": str(TOP / "tools")}
    run = partial(subprocess.run, env=environment, cwd=TOP, capture_output=True, text=True, timeout=300)
    done = run([*command, "--tests", *tests])
    assert done.returncode == 0, done.stdout + done.stderr
    survey = [json.loads(line) for line in (tmp_path / "power/survey.jsonl").read_text().splitlines()]
    mutants = [json.loads(line) for line in (tmp_path / "power/mutants.jsonl").read_text().splitlines()]
    assert [(row["test"], row["outcome"]) for row in survey] == [(test, "passed") for test in tests]
    assert [row["mutant"] for row in mutants] == list(range(1, 41))
    reached = {number for row in survey for number in row["reached"]}
    for row in mutants:
        assert (row["mutant"] in reached) == bool(row["reaching"]) == bool(row["met"])
    assert any(row["killers"] for row in mutants)
    told = run([*command, "--tell"]).stdout
    assert told and told in done.stdout and f"{len(survey)} tests" in told and "no test kills" in told
