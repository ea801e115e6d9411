"""Verdicts on large pipeline schedules: `python benchmarks/runtime/schedules.py`.

Status 1 when one takes a second or more. The last line is one JSON object: CPU seconds, one thread, medians of five (of
one for what is not promised).
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from benchmarks.cases._schedule_cases import KINDS, LARGE, MOST_SECONDS, crossed, seconds


def measure() -> dict[str, dict[str, float]]:
    """Kind -> what is done with its schedule -> seconds."""
    from vescale_pipeline import generate, simulate, verify

    found = {}
    for kind in KINDS:
        schedule = generate(kind, *LARGE)
        by_hand = crossed(schedule)
        found[kind] = {
            "actions": sum(map(len, schedule.actions)),
            "generate": seconds(partial(generate, kind, *LARGE), times=1),
            "verify": seconds(partial(verify, schedule)),
            "verify, written by hand": seconds(partial(verify, by_hand, transport="buffered")),
            "simulate": seconds(partial(simulate, schedule), times=1),
        }
    return found


def main() -> int:
    found = measure()
    for kind, figures in found.items():
        print(kind, ", ".join(f"{name} {figure:.3g}" for name, figure in figures.items()))
    verdicts = [seconds for figures in found.values() for name, seconds in figures.items() if name.startswith("verify")]
    print(json.dumps({"ranks, microbatches, stages per rank": LARGE, "most": MOST_SECONDS, "seconds": found}))
    return 0 if max(verdicts) < MOST_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
