"""How long schedules take on gloo, beside what `simulate` says, for stages of a known cost.

    python benchmarks/runtime/pipeline_makespan.py [--steps N] [--unit MS] [--report-only]

Four ranks, 8 microbatches, every kind of schedule. A stage computes next to nothing and sleeps instead, for F, I and W
each its time, longer on the later stages; asleep, four ranks do not contend for two cores. The makespan is from the
first action's start to the last one's end over all ranks, the median of a few steps; beside it the fastest, since what
else runs on the machine can only add. Transfers cost nothing in the simulation. The budget: the median within 10% of
it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from vescale_testkit import run_ranks

RANKS, COUNT, WIDTH = 4, 8, 8
BUDGET = 0.10
VIRTUAL = {
    "gpipe": 1,
    "1f1b": 1,
    "zb-h1": 1,
    "zb-h2": 1,
    **dict.fromkeys(("interleaved", "looped-bfs", "interleaved-zb", "zbv", "v-half", "v-min", "dualpipe-v"), 2),
}
FORWARD, INPUT, WEIGHT = 1.0, 1.2, 0.7
"""Costs of F, I and W on the first stage, in units."""


def slower(stage: int) -> float:
    """What a stage's costs are multiplied by."""
    return 1 + 0.05 * stage


class Forward(torch.autograd.Function):
    """The identity; sleeps on its way forwards and backwards."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        time.sleep(ctx.seconds)
        return gradient.clone(), None, None


class Sleeper(nn.Module):
    """Adds a weight to its input. The weight's gradient sleeps apart from the input's."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = Forward.apply(x, FORWARD * self.scale, INPUT * self.scale)
        return x + Forward.apply(self.weight, 0.0, WEIGHT * self.scale)


class Model(nn.Module):
    def __init__(self, stages: int, unit: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sleeper(unit * slower(stage)) for stage in range(stages))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def measured(kind: str, steps: int, unit: float) -> list[tuple[float, float]]:
    """When this rank began and ended, step by step, in seconds of the machine's clock."""
    from vescale_pipeline import generate, record_events
    from vescale_pipeline.engine import Runtime, ownership

    torch.manual_seed(0)
    schedule = generate(kind, RANKS, COUNT, VIRTUAL[kind])
    model = Model(schedule.stages, unit)
    cuts = tuple(f"blocks.{stage}" for stage in range(1, schedule.stages))
    ranks = list(range(RANKS))
    group, store = dist.new_group(ranks), dist.distributed_c10d._get_default_store()
    Runtime(model, schedule, ownership(model, cuts), ranks, group, store, timeout=timedelta(minutes=1))
    x, y = torch.randn(2, COUNT, WIDTH).unbind()
    spans = []
    for _ in range(steps + 1):
        dist.barrier()
        with record_events() as events:
            model(x, y).backward()
        spans.append((min(event.start for event in events), max(event.end for event in events)))
    return spans[1:]  # the first tells headers


def main() -> int:
    from vescale_pipeline import Costs, generate, simulate

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--unit", type=float, default=20.0, help="what F takes on the first stage, in ms")
    parser.add_argument("--report-only", action="store_true", help="always exit with status 0")
    arguments = parser.parse_args()
    figures = {}
    print(f"{'ms':<16}{'simulated':>11}{'measured':>10}{'over it':>9}{'fastest':>9}")
    for kind, virtual in VIRTUAL.items():
        schedule = generate(kind, RANKS, COUNT, virtual)
        units = [arguments.unit * slower(stage) for stage in range(schedule.stages)]
        inputs = [0.0, *(INPUT * unit for unit in units[1:])]  # the batch has no gradient
        costs = Costs([FORWARD * unit for unit in units], inputs, [WEIGHT * unit for unit in units])
        wanted = simulate(schedule, costs).makespan
        per_rank = run_ranks(RANKS, measured, kind, arguments.steps, arguments.unit / 1e3, timeout=120)
        steps = [max(end for _, end in spans) - min(start for start, _ in spans) for spans in zip(*per_rank)]
        taken, fastest = statistics.median(steps) * 1e3, min(steps) * 1e3
        over = {"over": taken / wanted - 1, "fastest_over": fastest / wanted - 1}
        figures[kind] = {"simulated_ms": round(wanted, 1), "measured_ms": round(taken, 1)}
        figures[kind] |= {name: round(share, 4) for name, share in over.items()}
        print(f"{kind:<16}{wanted:>11.1f}{taken:>10.1f}{over['over']:>+9.1%}{over['fastest_over']:>+9.1%}", flush=True)
    worst = max(abs(each["over"]) for each in figures.values())
    print(json.dumps({"worst": worst, **figures}))
    return int(worst > BUDGET and not arguments.report_only)


if __name__ == "__main__":
    sys.exit(main())
