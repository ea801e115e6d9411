"""Runs torch's operator database on a 2x2 mesh with mixed placements, against one device: all of it, or some entries.

    python tools/sweeps/operator_sweep.py [--samples N] [ENTRY ...]

Prints each entry that is wrong or raises as it is found; the last line is JSON, the counts.
"""

import argparse
import json
import sys
import time

from vescale_testkit import warm_up
from vescale_testkit.operator_sweep import DATABASE, RAISES, Outcome, check_entry, database, summary

SLOW = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", help="name, or name.variant; all by default")
    parser.add_argument("--samples", type=int, default=6, help="of each entry, the largest")
    asked = parser.parse_args()
    warm_up(DATABASE)  # once, instead of on each rank
    names = [n for n in database() if not asked.entries or n in asked.entries or database()[n].name in asked.entries]
    if not names:
        parser.error("the database has no such entry")

    began = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    for name in names:
        started = time.monotonic()
        outcomes[name] = outcome = check_entry(name, asked.samples)
        if outcome.kind in ("wrong", "raise"):
            reason = f" ({RAISES[name][1]})" if outcome.kind == "raise" else ""
            print(f"{outcome.kind} {name}{reason}: {outcome.text}\n", flush=True)
        if time.monotonic() - started > SLOW:
            print(f"slow {name}: {time.monotonic() - started:.0f} s\n", flush=True)
    stale = [name for name in names if name in RAISES and outcomes[name].kind != "raise"]
    if stale:
        print(f"listed in RAISES, and did not raise: {', '.join(stale)}")
    print(json.dumps({**summary(outcomes), "samples": asked.samples, "seconds": round(time.monotonic() - began)}))
    return 1 if stale or any(outcome.kind == "wrong" for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
