"""Prints what filling a shard with random numbers costs over stock torch, beside the budgets; JSON at the end.

    python benchmarks/runtime/fills.py [--rounds N]

Exit status 1 when a ratio is over its budget.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from benchmarks.cases import _fill_cases
from benchmarks.cases._budgets import budget_of
from benchmarks.cases._fake_group import fake_mesh


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    figures, unmet = {}, []
    with fake_mesh() as mesh:
        for fill, layout in _fill_cases.cases():
            race = _fill_cases.run(mesh, fill, layout, rounds)
            for stream, baseline in _fill_cases.BASELINES.items():
                ratio = race.ratio(stream, baseline)
                budget = budget_of("bench_fills.Fills.track_over_stock_torch", fill, layout, stream)
                name = f"{fill} {layout}, stream {stream}, over {baseline}"
                figures[name] = {"ratio": round(ratio.median, 3), "budget": budget}
                print(f"{name:<62}{ratio!s:<22}{'' if budget is None else f'at most {budget:.2f}'}")
                if budget is not None and ratio.median > budget:
                    unmet.append(name)
    print(json.dumps({"unmet": unmet, "figures": figures}))
    return int(bool(unmet))


if __name__ == "__main__":
    sys.exit(main())
