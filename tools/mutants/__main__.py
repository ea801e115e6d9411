"""Surveys, draws, runs; see the package's docstring."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("VESCALE_SECOND_HANG_SECONDS", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

from sweeps.training_cases import CASES
from sweeps.training_verdict import wanted_of
from vescale_testkit import warm_up

from . import hunt

TRAININGS = 4
"""So many are tried with a mutant that nothing sees."""
KEPT = hunt.TOP / ".mutants"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--each", type=int, default=16, help="mutants of each kind")
    parser.add_argument("--kinds", nargs="*", default=list(hunt.KINDS), choices=hunt.KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="trainings; all without it")
    parser.add_argument("--again", action="store_true", help="survey anew, and run all mutants again")
    parser.add_argument("--out", type=Path, help="the results' file")
    given = parser.parse_args()
    warm_up("torch._dynamo", "vescale", "transformers")
    KEPT.mkdir(exist_ok=True)
    places = hunt.all_places()
    seen, failing = _surveyed(given.cases, given.again)
    chances = hunt.chances(places, seen)
    chosen = hunt.drawn([one for one in chances if one.place.kind in given.kinds], given.each, given.seed)
    kept = KEPT / f"{_tree()}-verdicts.json"
    done = {} if given.again or not kept.exists() else json.loads(kept.read_text())
    wanted = {}
    found = []
    for at, (place, names) in enumerate(chosen):
        # What changes nothing in one training may in another.
        for name in names[:TRAININGS]:
            key = f"{place.file}:{place.number}:{name}:{given.seed}"
            if key not in done:
                if name not in wanted:
                    wanted[name] = wanted_of(CASES[name])
                done[key] = hunt.verdict(place, CASES[name], wanted[name], seen[name], given.seed + at).as_json()
                kept.write_text(json.dumps(done))
            if not done[key]["caught by"].startswith("nothing"):
                break
        print(json.dumps(done[key]), flush=True)
        found.append(done[key])
    return _written(given, found, places, seen, failing, chances)


def _surveyed(names: list[str], again: bool) -> tuple[dict[str, hunt.Seen], dict[str, str]]:
    """What each case reaches; kept for this state of the sources. And the cases that fail as they are."""
    path = KEPT / f"{_tree()}-survey.json"
    kept = {} if again or not path.exists() else json.loads(path.read_text())
    for name in names:
        if name not in kept:
            began = time.monotonic()
            found = hunt.survey(CASES[name])
            if isinstance(found, hunt.Seen):
                kept[name] = found._asdict()
            else:
                kept[name] = found
            path.write_text(json.dumps(kept))
            print(f"survey: {name}: {time.monotonic() - began:.1f} s", flush=True)
    seen, failing = {}, {}
    for name in names:
        one = kept[name]
        if isinstance(one, str):
            failing[name] = one
        else:
            effects = {file: {int(n): times for n, times in found.items()} for file, found in one["effects"].items()}
            seen[name] = hunt.Seen(effects, one["waits"], one["traffic"], one["seconds"])
    return seen, failing


def _tree() -> str:
    """Of the sources that are surveyed, and of what surveys them."""
    digest = hashlib.blake2b(digest_size=6)
    for source in [*sorted(hunt.TOP.glob("packages/*/src/**/*.py")), *sorted(hunt.TOP.glob("tools/**/*.py"))]:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _written(given, found, places, seen, failing, chances) -> int:
    equivalent = [one for one in found if one["caught by"] == "nothing: equivalent"]
    found = [one for one in found if one not in equivalent]
    survivors = [one for one in found if one["caught by"] == "nothing"]
    reached = {(file, number) for one in seen.values() for file, numbers in one.effects.items() for number in numbers}
    by_kind = {
        kind: {
            "places": sum(place.kind == kind for of_file in places.values() for place in of_file),
            "reached": sum(place.kind == kind and (file, place.number) in reached
                           for file, of_file in places.items() for place in of_file),
            "with an effect": sum(chance.place.kind == kind for chance in chances),
            "run": sum(one["kind"] == kind for one in found),
            "red": sum(one["kind"] == kind and one["caught by"] != "nothing" for one in found),
        }
        for kind in hunt.KINDS
    }  # fmt: skip
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=hunt.TOP, check=False)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git.stdout.strip(),
        "torch": torch.__version__,
        "seed": given.seed,
        "trainings": len(seen),
        "trainings that fail as they are": failing,
        "mutants": len(found),
        "red": len(found) - len(survivors),
        "caught by": dict(Counter(one["caught by"] for one in found)),
        "kinds": by_kind,
        "survivors": survivors,
        "equivalent": equivalent,
        "all": found,
    }
    out = given.out or hunt.TOP / "results" / f"{datetime.now(UTC):%Y-%m-%d}-mutants.json"
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"mutants": len(found), "red": len(found) - len(survivors), "caught by": report["caught by"]}))
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
