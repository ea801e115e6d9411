"""Random programs of the tests' generators, in parts that go on where they stopped, and what became of them by kind.

    python tools/sweeps/random_programs.py run trainings 2000 2600 FILE     seeds 2000 to 2599, a line of JSON each
    python tools/sweeps/random_programs.py run pipelines 0 500 FILE
    python tools/sweeps/random_programs.py run graphs 0 200 FILE            200 seeds on each of four meshes
    python tools/sweeps/random_programs.py tell FILE...                     counts and refusals, as JSON
    python tools/sweeps/random_programs.py table RESULTS.json               docs/random-programs.md, of what `tell` said

A seed that a file has is not run again. What is wrong is told with its seed; a refusal is known by its first line, with
names and numbers left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from sweeps.recorded import tree

TESTS = Path(__file__).absolute().parents[2] / "packages/vescale/tests"
AT_ONCE = 20

# Beginning of a kind -> why what one device does is refused.
REASONS = {
    "ViewError: copy_: in-place write to a view": "the view is a sum that is still partial, which had to be "
    "reduced for what was written: the reduced values lie in other memory than the base, out of a write's reach",
    "PipelineError: pipeline: the buffer * is written inside a checkpoint": "a recompute happens when other "
    "microbatches have written the buffer; one device would recompute from the value of this one",
    "PipelineError: pipeline: the buffer * is written in stage #, and read": "an earlier stage has begun the next "
    "microbatch before a later one has written what it would read",
    "PipelineError: pipeline: the buffer * is written in stages": "as above, between two writers",
    "invalid": "one device raises, too",
}

def trainings(seeds: list[int]) -> Iterator[tuple[str, str]]:
    good, wrong = _module("models/test_trainings").verdicts(seeds)
    yield from ((str(seed), verdict) for seed, verdict in good.items())
    yield from ((str(seed), f"differs: {told}"[:2000]) for seed, told in wrong.items())


def pipelines(seeds: list[int]) -> Iterator[tuple[str, str]]:
    judged = _module("pipelines/test_pipeline_random").judged
    try:
        found = judged(seeds)
    except Exception as error:  # one of them: which, each by itself tells
        if len(seeds) == 1:
            yield str(seeds[0]), f"differs: {error}"[:2000]
            return
        for seed in seeds:
            yield from pipelines([seed])
        return
    yield from ((str(seed), v if v == "ran" else f"refused: {v}") for seed, v in found.items())


def graphs(seeds: list[int]) -> Iterator[tuple[str, str]]:
    module = _module("reproducible/test_reproducible_graphs")
    for mesh, sizes in module.MESHES.items():
        ranks = math.prod(sizes.values())
        for seed, *verdicts in zip(seeds, *module.run_ranks(ranks, module.compare, seeds, sizes, timeout=600)):
            alike = len(set(verdicts)) == 1
            yield f"{seed} on {mesh}", verdicts[0].replace("equal", "ran") if alike else f"differs: {verdicts}"


def kind_of(verdict: str) -> str:
    """The verdict without what is of one program: names, shapes, numbers."""
    if verdict.startswith("differs"):
        return "differs"
    line = verdict.splitlines()[0]
    line = re.sub(r"'[^']*'|\b[\w]+(\.[\w]+)+\b", "*", line)
    return re.sub(r"\b\w*\d[\w.]*\b", "#", line)


def tell(files: list[Path]) -> dict:
    """Counts by generator and kind, and the seeds of what is wrong."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    told: dict = {}
    for generator in sorted({line["of"] for line in lines}):
        mine = {line["seed"]: line for line in lines if line["of"] == generator}
        kinds = Counter(kind_of(line["verdict"]) for line in mine.values())
        told[generator] = {
            "programs": len(mine),
            "ran": kinds["ran"],
            "trees": sorted({line["tree"] for line in mine.values()}),
            "not": dict(kinds.most_common()) | {},
            "differs": {seed: line["verdict"] for seed, line in mine.items() if "differs" in line["verdict"][:8]},
        }
        told[generator]["not"].pop("ran", None)
    return told


def table(told: dict) -> str:
    """What was refused by kind, of the results of `tell`, as a page."""
    lines = [
        "# What random programs are refused",
        "",
        "Made by `python tools/sweeps/random_programs.py table`. The tests' generators write programs that run on one "
        "device. On a mesh, each program either gives the results of one device or is refused, with the same error "
        "text on all ranks. `*` stands for names and `#` for numbers.",
    ]
    for generator, one in told.items():
        lines += ["", f"## {generator}: {one['ran']} of {one['programs']} ran, {len(one['differs'])} differed", ""]
        if one["not"]:
            lines += ["| programs | refused | because |", "|---|---|---|"]
        for kind, count in one["not"].items():
            reason = next((why for start, why in REASONS.items() if start in kind), "")
            lines.append(f"| {count} | {kind.removeprefix('refused: ')} | {reason} |")
    return "\n".join(lines) + "\n"


def _module(name: str) -> object:
    folder, _, module = name.rpartition("/")
    sys.path.insert(0, str(TESTS / folder))
    return importlib.import_module(module)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = parser.add_subparsers(dest="way", required=True)
    run = ways.add_parser("run")
    run.add_argument("of", choices=("trainings", "pipelines", "graphs"))
    run.add_argument("start", type=int)
    run.add_argument("stop", type=int)
    run.add_argument("file", type=Path)
    ways.add_parser("tell").add_argument("files", type=Path, nargs="+")
    ways.add_parser("table").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.way == "table":
        print(table(json.loads(options.file.read_text())["generators"]), end="")
        return 0
    if options.way == "tell":
        told = tell(options.files)
        print(json.dumps(told, indent=1))
        return any(one["differs"] for one in told.values())
    lines = options.file.read_text().splitlines() if options.file.exists() else []
    done = {line["seed"].split(" ")[0] for line in map(json.loads, lines) if line["of"] == options.of}
    left = [seed for seed in range(options.start, options.stop) if str(seed) not in done]
    for at in range(0, len(left), AT_ONCE):
        found = list(globals()[options.of](left[at : at + AT_ONCE]))
        with options.file.open("a") as file:
            for seed, verdict in found:
                line = {"of": options.of, "seed": seed, "verdict": verdict, "tree": tree()}
                file.write(json.dumps(line) + "\n")
        print(f"{options.of}: {at + AT_ONCE} of {len(left)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
