"""The planner's choice for each published run, held against the published configuration by dry run.

    python benchmarks/planning/published_choices.py [--json FILE] [--only TEXT]

`published.py` prices by formula, as the search does. Here the engine itself runs both plans, the published one and the
choice, on tensors without values in the row's world, in bfloat16, and `vescale.predict` prices what it did on the row's
hardware: its operators one by one, its collectives, and for a pipeline the simulated schedule of its stages. So a
choice that the formula flatters is found out. One counts as found if its step takes at most GAIN more than the
published one's; status 1 below BUDGET of the rows.

Models are transformers' own, without the kernels of the row's system, for both plans alike (so a step takes longer than
there), and attention is fused. A published configuration of more stages than the model has blocks is taken with as many
laps of stages as there are blocks for.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from published import GAIN, ROWS, Row, candidate_of, gpt, ranks_of, request_of, stock

BUDGET = 0.8


def model_of(one: Row):
    """As transformers has it."""
    family, *sizes = one.model
    with torch.device("meta"):
        return gpt(*sizes) if family == "gpt" else experts(*sizes) if family.startswith("qwen") else stock(*sizes)


def experts(layers: int, hidden: int, heads: int, groups: int, inner: int, experts: int, chosen: int):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=151936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, head_dim=128,
            num_key_value_heads=groups, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=chosen,
        )
    )  # fmt: skip


def expressible(structure, candidate):
    """With at most as many stages as there are blocks."""
    laps = (len(structure.cut_points) + 1) // candidate.pp
    return replace(candidate, virtual=min(candidate.virtual, laps))


def compared(one: Row) -> dict:
    """One row's figures."""
    import vescale
    from vescale_plans.search import plan_of, rank
    from vescale_plans.search.pricer import Pricer

    request, model = request_of(one), model_of(one)
    published = expressible(request.structure, candidate_of(one, Pricer(request)))
    best = rank(request)[0]
    ids = torch.zeros(one.batch, one.seq, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}

    narrow = vescale.Precision(torch.bfloat16)
    plans = [plan_of(request.structure, one).override(precision=narrow) for one in (published, best)]
    theirs = vescale.predict(plans[0], model, batch, request.hardware)
    alike = plans[0].to_json() == plans[1].to_json()
    ours = theirs if alike else vescale.predict(plans[1], model, batch, request.hardware)
    ratio = ours.seconds / theirs.seconds
    return {
        "row": one.name, "source": one.source, "gpus": ranks_of(one), "published": str(published),
        "published s": round(theirs.seconds, 3), "published spent": rounded(theirs.spent),
        "chosen": str(best.candidate), "chosen s": round(ours.seconds, 3), "chosen spent": rounded(ours.spent),
        "by formula s": round(best.cost.total, 3), "ratio": round(ratio, 4), "found": ratio <= 1 + GAIN,
    }  # fmt: skip


def rounded(spent) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in spent.items()}


def summed(rows: list[dict]) -> dict:
    ratios = [one["ratio"] for one in rows]
    return {
        "rows": len(rows), "found": sum(one["found"] for one in rows), "median ratio": round(median(ratios), 4),
        "worst ratio": max(ratios),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="rows that the file has are not computed again")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    path = Path(arguments.json) if arguments.json else None
    known = {one["row"]: one for one in json.loads(path.read_text())["table"]} if path and path.exists() else {}
    rows = []
    for one in ROWS:
        if arguments.only in one.name:
            rows.append(known.get(one.name) or compared(one))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if path:
                path.write_text(json.dumps({**summed(rows), "table": rows}, indent=1) + "\n")
    print(json.dumps(record := summed(rows)))
    return int(record["found"] < BUDGET * len(rows))


if __name__ == "__main__":
    sys.exit(main())
