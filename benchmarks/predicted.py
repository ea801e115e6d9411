"""Predicted against measured: a training step of every mesh of data, tensor, sequence and pipeline parallelism on gloo.

    python benchmarks/predicted.py measure --ranks 2 --folder FOLDER     # calibrates, then measures
    python benchmarks/predicted.py report --ranks 2 --folder FOLDER      # prices dry runs on that profile
    python benchmarks/predicted.py all --ranks 2 --folder FOLDER         # both
    python benchmarks/predicted.py memory --folder FOLDER [--count 100] [--seconds N]

What is in the folder is kept, round by round, so that any of them can be cut and run again: profileN.json is what
`vescale calibrate` measured, roundsN.jsonl the steps, predictedN.json and .png the report. Three models at two shapes,
each on every mesh, steps with AdamW, one thread a rank. `report` prints every point and closes with a line of JSON:
rank correlation over all points, the median error, and what the plan that is predicted fastest loses to the measured
best. Nothing is fitted to what was measured.

`memory` is the peaks that a dry run and the closed form predict against what the allocator gives out in real runs, of
random plans; and whether the collectives that a dry run counts are those that the run issues, one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from planning import predicted_memory
from planning.predicted_cases import CASES, MESHES
from planning.predicted_points import add_measured, draw, judged, predicted
from planning.predicted_steps import measure, rounds_in
from vescale_testkit import warm_up

sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "examples"))

BUDGETS = {
    2: {"spearman": 0.9, "regret": 0.05, "median error": 0.15},
    4: {"spearman": 0.9, "regret": 0.10, "median error": None},
}


ROUNDS = 9
"""Of the calibration: a case is visited over minutes, in which a machine changes its speed."""


def measured(arguments) -> int:
    from vescale.calibrate import calibrate

    folder, ranks = arguments.folder, arguments.ranks
    profile = folder / f"profile{ranks}.json"
    if not profile.exists():
        write(profile, calibrate(ranks, rounds=ROUNDS).to_json())
    warm_up("vescale", "transformers")
    measure(CASES, ranks, folder / f"rounds{ranks}.jsonl", arguments.clean, arguments.visits, arguments.seconds)
    return 0


def write(path: Path, text: str) -> None:
    """Whole, or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    os.replace(draft, path)


def report(arguments) -> int:
    folder, ranks = arguments.folder, arguments.ranks
    rounds = rounds_in(folder / f"rounds{ranks}.jsonl")
    cases = [case for case in CASES if case in rounds]
    points = add_measured(predicted(ranks, folder / f"profile{ranks}.json", cases), rounds)
    record: dict = {"ranks": ranks}
    for way in ("predicted", "closed form"):
        record[way] = judged(points, cases, way)
    for (case, mesh), point in points.items():
        error = point["predicted"] / point["measured"] - 1
        print(
            f"{case:<12} {mesh:<14} measured {point['measured']:.3f} s  predicted {point['predicted']:.3f}"
            f" ({error:+.0%})  closed form {point['closed form']:.3f}  others {point['foreign']:.1f}  {point['spent']}"
        )
    met = len(points) == len(CASES) * len(MESHES[ranks])
    for name, budget in BUDGETS[ranks].items():
        value = record["predicted"][name]
        if budget is not None:
            met &= value >= budget if name == "spearman" else value <= budget
        print(f"{name:<14} {value:.3f}  budget {budget}   closed form {record['closed form'][name]:.3f}")
    record["points"] = [
        {"case": case, "mesh": mesh, **{k: round(v, 5) if isinstance(v, float) else v for k, v in point.items()}}
        for (case, mesh), point in points.items()
    ]
    draw(points, ranks, folder / f"predicted{ranks}.png")
    write(folder / f"predicted{ranks}.json", json.dumps(record, indent=1) + "\n")
    print(json.dumps({name: value for name, value in record.items() if name != "points"}))
    return int(not met)


def everything(arguments) -> int:
    return measured(arguments) or report(arguments)


def memory(arguments) -> int:
    return predicted_memory.memory(arguments.folder, arguments.count, arguments.seconds)


COMMANDS = {"measure": measured, "report": report, "all": everything, "memory": memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2, choices=list(MESHES))
    parser.add_argument("--clean", type=int, default=15, help="undisturbed rounds of each case, a step of each mesh")
    parser.add_argument("--visits", type=int, default=3, help="processes that share the rounds of a case")
    parser.add_argument("--seconds", type=float, help="of one visit to a case, or of `memory`, at most")
    parser.add_argument("--count", type=int, default=100, help="of random plans")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    arguments.seconds = arguments.seconds or (1e9 if arguments.command == "memory" else 150.0)
    return COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
