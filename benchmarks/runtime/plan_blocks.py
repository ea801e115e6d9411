"""Four Llama blocks, forward and backward, tensor and sequence parallel on 8 fake ranks: over the hand-written ones.

    python benchmarks/runtime/plan_blocks.py [--rounds N]

Contenders take turns within a round (`_pairwise.py`). The sum of norm gradients over ranks is in nobody's time, and
rotary tables come as they lie inside a model. Status 1 when a plan is over its budget; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

import vescale
from benchmarks.cases import _block_cases
from benchmarks.cases._block_cases import BY_HAND, SIZES, contenders
from benchmarks.cases._budgets import budget_of
from benchmarks.cases._fake_group import fake_mesh
from benchmarks.cases._pairwise import Race, race
from benchmarks.models._llama_blocks import SHARD_DIM, activations, blocks, rotary_table
from benchmarks.models._llama_by_hand import GatherTokens, ScatterTokens
from vescale import Boundary, Plan, Replicate, Shard

OURS = "veScale, a plan"
BUDGET = budget_of("bench_blocks.PlanBlocks.track_over_by_hand", OURS)


def plan(ranks: int) -> Plan:
    tokens, whole = {"tp": Shard(1)}, {"tp": Replicate()}
    border = Boundary(input=whole, output=tokens)
    weights = {f"*.{name}.weight": {"tp": Shard(dim)} for name, dim in SHARD_DIM.items()}
    return Plan(
        mesh={"tp": ranks},
        parameters={**weights, "*": {}},
        boundaries={"*.self_attn": border, "*.mlp": border},
        data_axis=None,
    )


def by_plan(ranks: int):
    """The step of a parallelized model; its gradients stay partial."""
    model, _ = vescale.parallelize(plan(ranks), blocks(SIZES))
    mesh = model._vescale.device_mesh
    model._vescale.sync.enabled = False
    tokens = vescale.distribute_tensor(activations(SIZES), mesh, (Shard(1),))
    tables = tuple(vescale.distribute_tensor(table, mesh, (Replicate(),)) for table in rotary_table(SIZES))
    return _block_cases.step(model, tokens, tables)


def measured(rounds: int) -> Race:
    with fake_mesh() as mesh:
        ready = {name: make() for name, make in contenders(mesh).items()}
        ready[OURS] = by_plan(mesh.size())
        for function in (GatherTokens, ScatterTokens):
            del function.apply  # `parallelize` gives every Function of a program one that costs a little more
        return race(ready, rounds=rounds, calls=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    found = measured(parser.parse_args().rounds)
    figures = {}
    for name in found.seconds:
        ratio = found.ratio(name, BY_HAND)
        figures[name] = {"ratio": round(ratio.median, 4), "quartiles": [round(ratio.lower, 4), round(ratio.upper, 4)]}
        print(f"{name:<24} {ratio}  {f'budget {BUDGET:.2f}' if name == OURS else ''}")
    print(json.dumps(figures))
    return int(figures[OURS]["ratio"] > BUDGET)


if __name__ == "__main__":
    sys.exit(main())
