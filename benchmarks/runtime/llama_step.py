"""The example Llama's whole training step on 2 gloo ranks, tensor and sequence parallel: over the same split by hand.

    python benchmarks/runtime/llama_step.py [--rounds N]

Forward, loss, backward, gradient sums, AdamW. The clock is the CPU time of both ranks' processes together, the pairs
are taken in turn, a ratio is the median over them. All variants train on the same batches, and their losses must agree
to 1e-5. Status 1 when veScale is over its budget; the last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from statistics import quantiles

import torch

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
sys.path.insert(0, str(Path(__file__).absolute().parents[2] / "examples"))

import vescale
from benchmarks.cases._budgets import budget_of
from benchmarks.models._llama_example_by_hand import split_by_hand, sum_norm_gradients
from vescale_plans import library
from vescale_testkit import run_ranks, warm_up

BY_HAND, OURS = "by hand", "veScale"
BUDGET = budget_of("bench_blocks.LlamaStep.track_over_by_hand", OURS)
BATCH, POSITIONS, LEAST, WARM = 8, 32, 30, 4


def example():
    from llama.model import build

    torch.manual_seed(0)
    return build()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=5e-4)


def by_hand():
    model = split_by_hand(example(), torch.distributed.get_rank(), torch.distributed.get_world_size())
    optimizer, positions = adamw(model.parameters()), torch.arange(POSITIONS).unsqueeze(0)

    def step(tokens: torch.Tensor) -> float:
        # Inside, the sequence is split: positions and the (causal) mask are said here, once.
        loss = model(input_ids=tokens, labels=tokens, position_ids=positions).loss
        loss.backward()
        sum_norm_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def by_plan():
    plan = library.llama(mesh={"tp": torch.distributed.get_world_size()})
    model, optimizer = vescale.parallelize(plan, example(), adamw)

    def step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def raced(rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU seconds of every step, and the losses. Runs on both ranks."""
    torch.set_num_threads(1)
    steps = {BY_HAND: by_hand(), OURS: by_plan()}
    batches = torch.Generator().manual_seed(1)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for round_ in range(rounds + WARM):
        tokens = torch.randint(256, (BATCH, POSITIONS), generator=batches)
        order = list(steps)
        if round_ % 2:
            order.reverse()
        for name in order:
            torch.distributed.barrier()
            began = time.process_time()
            losses[name].append(steps[name](tokens))
            if round_ >= WARM:
                seconds[name].append(time.process_time() - began)
    gc.enable()
    return seconds, losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = max(parser.parse_args().rounds, LEAST)
    warm_up("torch._dynamo", "vescale", "transformers")
    found = run_ranks(2, raced, rounds, timeout=400)
    figures = {}
    for name in (BY_HAND, OURS):
        apart = max(abs(a - b) / b for a, b in zip(found[0][1][name], found[0][1][BY_HAND]))
        if apart > 1e-5:
            raise SystemExit(f"{name} trains another model than by hand: losses differ by {apart:.1e}")
        spent = [sum(each) for each in zip(*(seconds[name] for seconds, _ in found))]
        base = [sum(each) for each in zip(*(seconds[BY_HAND] for seconds, _ in found))]
        lower, middle, upper = quantiles([a / b for a, b in zip(spent, base)], n=4)
        figures[name] = {
            "ratio": round(middle, 4), "quartiles": [round(lower, 4), round(upper, 4)], "pairs": rounds,
            "ms of both ranks": round(quantiles(spent, n=4)[1] * 1e3, 2), "losses apart": apart,
        }  # fmt: skip
        print(f"{name:<18} {middle:.3f} [{lower:.3f}, {upper:.3f}]  losses apart {apart:.1e}", flush=True)
    print(json.dumps(figures))
    return int(figures[OURS]["ratio"] > BUDGET)


if __name__ == "__main__":
    sys.exit(main())
