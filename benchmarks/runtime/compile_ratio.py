"""A training step of a Llama and a GPT on one device under `mode="compile"`: its time over plain `torch.compile`'s.

    python benchmarks/runtime/compile_ratio.py [--models llama gpt] [--hidden N] [--rounds N] [--layers N]
                                               [--batch N] [--positions N]

`--hidden 64 --layers 8 --batch 2 --positions 16` is a step in which the host is the bottleneck, as on a GPU.

Inductor on both sides, the same weights, batches and AdamW; forward, loss, backward, step. The clock is the CPU time of
the process, the contenders take turns within a round, a ratio is the median over rounds, and losses must agree to 1e-5.
Of both are counted: graphs that were compiled, breaks of graphs, and graphs that were compiled anew after the warm-up.
Status 1 when a ratio is over its budget, a graph of ours breaks, or one is compiled anew. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch
from torch import nn

import vescale
from vescale_plans import library
from vescale_testkit import run_ranks, warm_up

sys.path.insert(0, str(Path(__file__).absolute().parents[2] / "examples"))

PLAIN, COMPILED, EAGER = "torch.compile", "veScale, compile", "veScale, eager"
BUDGET = 1.05
VOCABULARY, WARM = 256, 4

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Sizes(NamedTuple):
    hidden: int = 256
    layers: int = 4
    batch: int = 8
    positions: int = 64


def build(name: str, sizes: Sizes) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt":
        from nanogpt.model import GPT, GPTConfig

        return GPT(GPTConfig(VOCABULARY, sizes.positions, n_layer=sizes.layers, n_head=8, n_embd=sizes.hidden))
    from llama.model import build as llama

    width = sizes.hidden
    return llama(hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=sizes.layers)


def gpt_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x, y)


def llama_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, labels=y).loss


LOSSES: dict[str, Loss] = {"llama": llama_loss, "gpt": gpt_loss}


def contender(kind: str, name: str, sizes: Sizes) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A training step."""
    adamw, loss_of = partial(torch.optim.AdamW, lr=5e-4), LOSSES[name]
    model: Any = build(name, sizes)
    if kind == PLAIN:
        optimizer, model = adamw(model.parameters()), torch.compile(model)
    else:
        plan = getattr(library, name)(mesh={"tp": 1})
        mode = "compile" if kind == COMPILED else "eager"
        model, optimizer = vescale.parallelize(plan, model, adamw, mode=mode)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def counted() -> dict[str, int]:
    found = torch._dynamo.utils.counters
    return {"graphs": found["stats"]["unique_graphs"], "breaks": sum(found["graph_break"].values())}


def raced(name: str, sizes: Sizes, rounds: int) -> tuple[dict[str, list[float]], ...]:
    """CPU seconds and losses of every step, and what was compiled. On the one rank."""
    torch.set_num_threads(1)
    batches = torch.Generator().manual_seed(1)
    shape = (2, sizes.batch, sizes.positions)
    data = [torch.randint(VOCABULARY, shape, generator=batches) for _ in range(rounds + WARM)]
    steps, counts = {}, {}
    losses: dict[str, list[float]] = {}
    for kind in (PLAIN, COMPILED, EAGER):
        torch._dynamo.utils.counters.clear()
        steps[kind] = contender(kind, name, sizes)
        losses[kind] = [steps[kind](x, y) for x, y in data[:WARM]]
        counts[kind] = counted()
    torch._dynamo.utils.counters.clear()
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    again = dict.fromkeys(steps, 0)
    gc.collect()
    gc.disable()
    for turn, (x, y) in enumerate(data[WARM:]):
        for kind in list(steps) if turn % 2 else reversed(steps):
            before = counted()["graphs"]
            began = time.process_time()
            losses[kind].append(steps[kind](x, y))
            seconds[kind].append(time.process_time() - began)
            again[kind] += counted()["graphs"] - before
    gc.enable()
    return seconds, losses, {kind: {**counts[kind], "compiled anew": again[kind]} for kind in steps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=sorted(LOSSES), default=sorted(LOSSES, reverse=True))
    for size, usual in Sizes()._asdict().items():
        parser.add_argument(f"--{size}", type=int, default=usual)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    if shutil.which("c++") is None:
        print("skipped: inductor makes C++ on a CPU, and there is no compiler for it")
        return 0
    warm_up("torch._dynamo", "vescale", "transformers")
    sizes = Sizes(*(getattr(arguments, size) for size in Sizes._fields))
    figures: dict[str, dict] = {}
    met = True
    for name in arguments.models:
        ((seconds, losses, counts),) = run_ranks(1, raced, name, sizes, arguments.rounds, timeout=900)
        apart = max(abs(a - b) / b for kind in losses for a, b in zip(losses[kind], losses[PLAIN]))
        if apart > 1e-5:
            raise SystemExit(f"{name}: another model is trained than by plain torch: losses differ by {apart:.1e}")
        figures[name] = {**sizes._asdict(), "rounds": arguments.rounds, "losses apart": apart}
        for kind, own in seconds.items():
            lower, middle, upper = quantiles([a / b for a, b in zip(own, seconds[PLAIN])], n=4)
            figures[name][kind] = {
                "ratio": round(middle, 4), "quartiles": [round(lower, 4), round(upper, 4)],
                "ms": round(quantiles(own, n=4)[1] * 1e3, 2), **counts[kind],
            }  # fmt: skip
            says = ", ".join(f"{number} {what}" for what, number in counts[kind].items())
            budget = f"  budget {BUDGET}" if kind == COMPILED else ""
            print(f"{name:<6} {kind:<18} {middle:.3f} [{lower:.3f}, {upper:.3f}]  {says}{budget}", flush=True)
        ours = figures[name][COMPILED]
        met = met and ours["ratio"] <= BUDGET and not ours["breaks"] and not ours["compiled anew"]
    print(json.dumps(figures))
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
