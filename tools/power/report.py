"""What the meter found: a cover of the kills, redundant tests, tests that are slow for what they kill, live mutants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .places import Place

_MOST = 25


def told(folder: Path) -> str:
    """The report of a folder of the meter, as text."""
    survey = {row["test"]: row for row in _rows(folder / "survey.jsonl")}
    drawn = [Place(*one) for one in json.loads((folder / "tree/places.json").read_text())]
    mutants = _rows(folder / "mutants.jsonl")
    killed = [row for row in mutants if row["killers"]]
    unknown = [row for row in mutants if not row["killers"] and row["hung"]]
    unreached = [row for row in mutants if not row["reaching"]]
    alive = [row for row in mutants if row["reaching"] and not row["killers"] and not row["hung"]]
    chosen = [row for row in killed if not drawn[row["mutant"] - 1].is_held_out]
    held_out = [row for row in killed if drawn[row["mutant"] - 1].is_held_out]
    core = cover([row["killers"] for row in chosen], {test: row["cpu"] for test, row in survey.items()})
    caught = sum(bool(core & set(row["killers"])) for row in held_out)
    kills: dict[str, int] = {}
    for row in killed:
        for test in row["killers"]:
            kills[test] = kills.get(test, 0) + 1
    met = {test for row in mutants for test in row["met"]}
    idle = sorted((survey[test] for test in met - kills.keys()), key=lambda row: -row["cpu"])
    slow = sorted((survey[test] for test in kills), key=lambda row: -row["cpu"] / kills[row["test"]])
    lines = [
        f"{len(survey)} tests, {sum(row['cpu'] for row in survey.values()):.0f} CPU s; "
        f"{sum(row['outcome'] == 'failed' for row in survey.values())} fail without a mutant",
        f"{len(mutants)} of {len(drawn)} mutants met tests, {sum(row['cpu'] for row in mutants):.0f} CPU s: "
        f"{len(killed)} killed, {len(alive)} alive, {len(unreached)} not reached, {len(unknown)} unknown (a test hung)",
        f"cover of the {len(chosen)} that are not held out: {len(core)} tests, "
        f"{sum(survey[test]['cpu'] for test in core):.1f} CPU s; of the {len(held_out)} held out it meets "
        f"known killers of {caught}",
        *_list("no test kills", [row["name"] for row in alive]),
        *_list("no test reaches", [row["name"] for row in unreached]),
        *_list("met mutants and killed none", [f"{row['cpu']:8.1f} s  {row['test']}" for row in idle]),
        *_list(
            "slow for what they kill",
            [f"{row['cpu']:8.1f} s, {kills[row['test']]} kills  {row['test']}" for row in slow if row["cpu"] > 1],
        ),
    ]
    return "\n".join(lines)


def cover(killers: list[list[str]], cost: dict[str, float]) -> set[str]:
    """Returns tests that kill all mutants, greedily by kills per CPU second (Chvatal's greedy set cover).

    Arguments:
        killers: the tests that kill each mutant.
        cost: CPU seconds of each test.
    """
    left, chosen = [set(one) for one in killers], set[str]()
    while left:
        kills: dict[str, int] = {}
        for one in left:
            for test in one:
                kills[test] = kills.get(test, 0) + 1
        best = max(sorted(kills), key=lambda test: kills[test] / max(cost[test], 0.01))
        chosen.add(best)
        left = [one for one in left if best not in one]
    return chosen


def _list(title: str, rows: list[str]) -> list[str]:
    more = [f"    and {len(rows) - _MOST} more"] * (len(rows) > _MOST)
    return ["", f"{title}: {len(rows)}", *(f"    {row}" for row in rows[:_MOST]), *more]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
