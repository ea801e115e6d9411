"""What spreading experts is worth, and what it costs, on 2 gloo ranks: ratios within one run.

    python benchmarks/runtime/experts.py [--rounds N]

Prints, and closes with a line of JSON:

- `ep2 over dp2`: a training step (forward, backward, AdamW) of one mixture-of-experts layer with its experts spread
  over the two ranks, over the same with every expert on both and gradients reduced. Wall time of the slower rank.
- `experts over one product`: the experts' forward and backward on the rows that arrived, 256 per expert, over one
  dense matrix product of the same floating point operations. CPU time. All of it is the model's own forward: what
  stands around it is not in it. So its parts are shown beside it, over the same product: its two grouped products, its
  gate (silu and a product of elements), and the rest (a sort of the rows, a gather, weights, a sum); and the whole once
  more at twice the width.

Exit status 1 when a ratio is over its budget.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from statistics import median, quantiles

import torch

from vescale_testkit import run_ranks, warm_up

HIDDEN, INNER, EXPERTS, CHOSEN, TOKENS = 512, 1024, 16, 2, 512
ROWS = 256
BUDGETS = {"ep2 over dp2": 0.8, "experts over one product": 1.1}


def layer(experts: int = EXPERTS, width: int = 1):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=HIDDEN * width, intermediate_size=INNER * width,
        num_local_experts=experts, num_experts_per_tok=CHOSEN,
    )
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return block


def training(rounds: int) -> list[tuple[float, float]]:
    """Seconds of a step per round: (ep2, dp2). Runs on both ranks."""
    from vescale_dtensor import Replicate
    from vescale_plans import Plan, parallelize

    torch.set_num_threads(1)
    plans = (
        Plan({"ep": 2}, {"*": {}}, data_axis="ep", expert_axis="ep"),
        Plan({"dp": 2}, {"experts.*": {"dp": Replicate()}, "*": {}}, expert_axis="dp"),
    )
    made = [parallelize(plan, layer(), lambda p: torch.optim.AdamW(p, lr=1e-4)) for plan in plans]
    x = torch.randn(8, TOKENS // 8, HIDDEN, generator=torch.Generator().manual_seed(1))

    def step(model, optimizer) -> float:
        torch.distributed.barrier()
        started = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.barrier()
        return time.perf_counter() - started

    for model, optimizer in made:
        for _ in range(4):  # the first calls compare the inputs of the ranks
            step(model, optimizer)
    gc.disable()
    return [tuple(step(*one) for one in made) for _ in range(rounds)]


def computing(rounds: int, width: int = 1) -> list[tuple[float, ...]]:
    """Seconds of forward and backward per round: of 8 experts on 256 rows each, of one product of as many operations,
    and of the experts' grouped products and gates alone."""
    torch.set_num_threads(1)
    count, hidden, inner = EXPERTS // 2, HIDDEN * width, INNER * width
    experts = layer(count, width).experts
    up, down = experts.gate_up_proj, experts.down_proj
    rows = torch.randn(ROWS * count, hidden, requires_grad=True)
    middle = torch.randn(ROWS * count, inner, requires_grad=True)
    both = torch.randn(ROWS * count, 2 * inner, requires_grad=True)
    ids = torch.arange(count).repeat_interleave(ROWS)[:, None]
    ends, ones = (torch.arange(count, dtype=torch.int32) + 1) * ROWS, torch.ones(len(rows), 1)
    # gate, up and down are three products [rows, hidden] x [hidden, inner]
    weight = torch.randn(hidden, 3 * inner, requires_grad=True)

    def products():
        first = torch.nn.functional.grouped_mm(rows, up.transpose(1, 2), offs=ends)
        second = torch.nn.functional.grouped_mm(middle, down.transpose(1, 2), offs=ends)
        return first, second

    def gates():
        gate, value = both.chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * value,)

    def timed(function) -> float:
        for leaf in (rows, middle, both, weight, *experts.parameters()):
            leaf.grad = None
        started = time.process_time()
        out = function()
        torch.autograd.backward(out, [one.detach() for one in out])
        return time.process_time() - started

    racers = (lambda: (experts(rows, ids, ones),), lambda: (rows @ weight,), products, gates)
    for function in racers:
        timed(function)
    return [tuple(timed(function) for function in racers) for _ in range(rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    warm_up("vescale_plans", "transformers")
    steps = run_ranks(2, training, rounds, timeout=240)
    slower = [tuple(map(max, zip(*pair))) for pair in zip(*steps)]
    alone, wide = computing(rounds), computing(max(rounds // 3, 3), 2)
    races = {
        "ep2 over dp2": slower,
        "experts over one product": [one[:2] for one in alone],
        "  of it: grouped products": [(one[2], one[1]) for one in alone],
        "  of it: gates": [(one[3], one[1]) for one in alone],
        "  of it: the rest": [(one[0] - one[2] - one[3], one[1]) for one in alone],
        "the same at twice the width": [one[:2] for one in wide],
    }
    record, met = {}, True
    for name, pairs in races.items():
        ratios = [ours / theirs for ours, theirs in pairs]
        low, middle, high = quantiles(ratios, n=4)
        budget = BUDGETS.get(name)
        met &= budget is None or middle <= budget
        print(f"{name:<28} {middle:.2f} [{low:.2f}, {high:.2f}]" + (f"  budget {budget:.2f}" if budget else ""))
        record[name.strip()] = {
            "ratio": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "budget": budget,
            "seconds": [round(median(side), 4) for side in zip(*pairs)],
        }
    sizes = {"hidden": HIDDEN, "inner": INNER, "experts": EXPERTS, "chosen": CHOSEN, "tokens": TOKENS, "rows": ROWS}
    print(json.dumps({"sizes": sizes, **record}))
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
