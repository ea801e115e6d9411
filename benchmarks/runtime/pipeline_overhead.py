"""What a pipeline's runtime costs per microbatch, beside torch.distributed.pipelining with the same stages.

    python benchmarks/runtime/pipeline_overhead.py [--rounds N] [--report-only]

Two gloo ranks, 8 blocks of hidden size 16, 8 microbatches of 4 rows: next to no compute. In one run, by turns: the
bare stages of a rank (forward and backward of each microbatch, nothing sent), torch's schedule, ours. The figure is the
main thread's CPU time per microbatch over the bare stages', the mean of both ranks, medians over rounds. Waiting
for the other rank is not in it. The budget is half of torch's. Of 1F1B the same is also written by hand, with gloo's
sends and receives and nothing else: what no runtime can be below. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from vescale_testkit import run_ranks

RANKS, BLOCKS, HIDDEN, ROWS, COUNT = 2, 8, 16, 4, 8
BUDGET = 0.5
KINDS = {
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, COUNT * ROWS, HIDDEN, generator=generator).unbind()


def part_of(stage: int, stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    size = BLOCKS // stages
    return nn.Sequential(*list(Model().blocks)[stage * size : (stage + 1) * size])


def bare(own: list[int], stages: int) -> Callable[[], None]:
    parts = [part_of(stage, stages) for stage in own]
    x = torch.randn(ROWS, HIDDEN)

    def step() -> None:
        for _ in range(COUNT):
            for part in parts:
                out = part(x.detach().requires_grad_())
                out.backward(x)

    return step


def by_hand(own: list[int]) -> Callable[[], None]:
    """1F1B of two stages and nothing else: gloo's own sends and receives, posted ahead, and autograd. What is over the
    bare stages here, nobody who sends on gloo can save."""
    rank, (stage,) = dist.get_rank(), own
    part, peer, (x, y) = part_of(stage, RANKS), 1 - rank, data()
    wire = dist.new_group()._get_backend(torch.device("cpu"))
    rows, targets = x.chunk(COUNT), y.chunk(COUNT)

    def send(tensor: Tensor, tag: int, sent: list) -> None:
        sent.append((wire.send([tensor], peer, tag), tensor))

    def first() -> None:
        arriving = [torch.empty(ROWS, HIDDEN) for _ in range(COUNT)]
        works = [wire.recv([one], peer, COUNT + i) for i, one in enumerate(arriving)]
        made, sent = {}, []
        for i in range(COUNT + 1):
            if i < COUNT:
                made[i] = part(rows[i])
                send(made[i].detach(), i, sent)
            if i:
                works[i - 1].wait()
                made.pop(i - 1).backward(arriving[i - 1])
        for work, _ in sent:
            work.wait()

    def last() -> None:
        arriving = [torch.empty(ROWS, HIDDEN) for _ in range(COUNT)]
        works = [wire.recv([one], peer, i) for i, one in enumerate(arriving)]
        sent: list = []
        for i in range(COUNT):
            works[i].wait()
            leaf = arriving[i].requires_grad_()
            (F.mse_loss(part(leaf), targets[i]) / COUNT).backward()
            send(leaf.grad, COUNT + i, sent)
        for work, _ in sent:
            work.wait()

    return last if rank else first


def torch_step(name: str, own: list[int], stages: int) -> Callable[[], None]:
    from torch.distributed import pipelining

    made = [pipelining.PipelineStage(part_of(stage, stages), stage, stages, torch.device("cpu")) for stage in own]
    schedule = getattr(pipelining, name)(made if stages > RANKS else made[0], COUNT, loss_fn=F.mse_loss)
    x, y = data()
    given = (x,) if 0 in own else ()
    target = {"target": y, "losses": []} if stages - 1 in own else {}

    def step() -> None:
        schedule.step(*given, **target)

    return step


def our_step(kind: str, virtual: int) -> Callable[[], None]:
    from vescale_pipeline import generate
    from vescale_pipeline.engine import Runtime, ownership

    torch.manual_seed(0)
    model = Model()
    schedule = generate(kind, RANKS, COUNT, virtual)
    cuts = tuple(f"blocks.{BLOCKS * stage // schedule.stages}" for stage in range(1, schedule.stages))
    ranks = list(range(RANKS))
    group, store = dist.new_group(ranks), dist.distributed_c10d._get_default_store()
    Runtime(model, schedule, ownership(model, cuts), ranks, group, store, timeout=timedelta(minutes=1))
    x, y = data()
    return lambda: model(x, y).backward()


def measured(kind: str, rounds: int) -> dict[str, float]:
    """Medians of the main thread's CPU seconds per microbatch."""
    from vescale_pipeline import generate

    warnings.simplefilter("ignore")
    name, virtual = KINDS[kind]
    schedule = generate(kind, RANKS, COUNT, virtual)
    own = list(schedule.stages_of(dist.get_rank()))
    steps = {
        "bare": bare(own, schedule.stages),
        "torch": torch_step(name, own, schedule.stages),
        "ours": our_step(kind, virtual),
    }
    if virtual == 1:
        steps["by hand"] = by_hand(own)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 5):
        for name, step in steps.items():
            dist.barrier()
            began = time.thread_time()
            step()
            if round_ >= 5:
                seconds[name].append((time.thread_time() - began) / COUNT)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--report-only", action="store_true", help="always exit with status 0")
    arguments = parser.parse_args()
    figures = {}
    print(f"{'us per microbatch':<20}{'bare':>8}{'torch over it':>16}{'ours over it':>14}{'ours / torch':>14}")
    for kind in KINDS:
        per_rank = run_ranks(RANKS, measured, kind, arguments.rounds, timeout=300)
        mean = {name: statistics.mean(taken[name] for taken in per_rank) * 1e6 for name in per_rank[0]}
        over = {name: mean[name] - mean["bare"] for name in mean if name != "bare"}
        ratio = over["ours"] / over["torch"]
        print(f"{kind:<20}{mean['bare']:>8.0f}{over['torch']:>+16.0f}{over['ours']:>+14.0f}{ratio:>14.2f}")
        figures[kind] = {f"{name}_over_bare_us": round(taken) for name, taken in over.items()}
        if "by hand" in over:
            print(f"{'  by hand':<20}{'':>8}{over['by hand']:>+16.0f}{'':>14}{over['by hand'] / over['torch']:>14.2f}")
        figures[kind] |= {"bare_us": round(mean["bare"]), "ratio": round(ratio, 3)}
    print(json.dumps(figures))
    return int(any(each["ratio"] > BUDGET for each in figures.values()) and not arguments.report_only)


if __name__ == "__main__":
    sys.exit(main())
