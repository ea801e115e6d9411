"""Prints every headline ratio beside its budget, then all of it as one line of JSON.

    python benchmarks/ratios.py [--report-only] [--rounds N]

Exit status 1 when a ratio is over its budget, or has a budget and could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata

import torch

from benchmarks.cases import _headlines
from benchmarks.cases._fake_group import fake_mesh
from benchmarks.cases._headlines import VESCALE, Headline

OTHERS = ("plain", "pass-through", "torch DTensor")
COLUMNS = "{:<38}{:>13}{:>10}  {:<19}{:>7}  {:>8}{:>14}{:>15}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report-only", action="store_true", help="always exit with status 0")
    parser.add_argument("--rounds", type=int, help="rounds of every race (300; 150 for the blocks)")
    arguments = parser.parse_args()
    rounds = {} if arguments.rounds is None else {"rounds": arguments.rounds}

    print("Times over the floor's: median [quartiles] over rounds in which all take turns.\n")
    header = ("", "floor", "its us", VESCALE, "budget", *OTHERS)
    print(COLUMNS.format(*header))
    headlines = []
    with fake_mesh() as mesh:
        for headline in _headlines.dispatch(mesh, **rounds):
            headlines.append(show(headline))
        headlines.append(show(_headlines.blocks(mesh, **rounds)))

    for name, count in headlines[-1].collectives.items():
        print(f"collectives in one step of the blocks, {name}: {count}")
    for reason in sorted({reason for each in headlines for reason in each.missing.values()}):
        print(f"{VESCALE} did not run: {reason}")
    unmet = [each.name for each in headlines if not each.met]
    print(f"budgets not met: {'; '.join(unmet)}" if unmet else "every budget is met")
    print(json.dumps(report(headlines)))
    return int(bool(unmet) and not arguments.report_only)


def show(headline: Headline) -> Headline:
    race, floor = headline.race, headline.floor
    cells = [f"{headline.ratio(name):.2f}" if name in race.seconds else "" for name in OTHERS]
    ours = str(race.ratio(VESCALE, floor)) if VESCALE in race.seconds else "not run"
    budget = "" if headline.budget is None else f"{headline.budget:.2f}"
    mark = "" if headline.met else "!"
    floor_us = f"{race.microseconds(floor):.2f}"
    row = (headline.name, floor, floor_us, ours, budget + mark, *cells)
    print(COLUMNS.format(*row), flush=True)
    return headline


def report(headlines: list[Headline]) -> dict:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vescale_dtensor": version_of("vescale-dtensor"),
        "met": all(each.met for each in headlines),
        "headlines": [each.as_json() for each in headlines],
    }


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
