"""A training step of a HuggingFace Llama on two gloo ranks under `mode="compile"`: its CPU time over eager mode's.

    python benchmarks/runtime/compile_shards.py [--plans tp zero3 pp recomputed] [--layers N] [--rounds N] [--deep N]

Inductor, AdamW, the same weights and batches; the modes take turns within a round, a ratio is the median over rounds of
rank 0, and losses must agree to 1e-5. `--deep N` also compiles N layers and one, and gives the ratio of the seconds.
Status 1 when a ratio is over its budget, or a block runs eagerly. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import warnings
from functools import partial
from statistics import median
from typing import Any

import torch

import vescale
from vescale import Plan, Shard
from vescale_testkit import run_ranks, warm_up

BUDGETS = {"ratio": 0.70, "deep": 2.5}
VOCABULARY, ROWS, POSITIONS = 256, 4, 32
COLUMNS, SUMS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def build(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, use_cache=False, **sizes))


def plan_of(name: str, model: Any) -> Plan:
    if name == "zero3":
        return Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3)
    if name == "pp":
        half = f"model.layers.{len(model.model.layers) // 2}"
        return Plan(mesh={"pp": 2}, parameters={"*": {}}, pipeline=vescale.Pipeline(cuts=(half,), microbatches=4))
    if name == "recomputed":
        return Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, checkpointing={"model.layers.*": True})
    cut = {f"*.{one}.weight": {"tp": Shard(dim)} for dim, names in enumerate((COLUMNS, SUMS)) for one in names}
    return Plan(mesh={"tp": 2}, parameters=cut | {"*": {}}).complete(model)


def trained(name: str, mode: str, layers: int) -> Any:
    """A training step, and the model."""
    model = build(layers)
    plan, make = plan_of(name, model), partial(torch.optim.AdamW, lr=1e-3)
    model, optimizer = vescale.parallelize(plan, model, make, mode=mode)

    def step(batch: torch.Tensor) -> float:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, model


def batch_of(turn: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(turn))


def raced(name: str, layers: int, rounds: int) -> tuple[float, float, list[str]]:
    """The ratio, how far losses are apart, and why blocks are eager."""
    torch.set_num_threads(1)
    steps = {mode: trained(name, mode, layers) for mode in ("eager", "compile")}
    seconds, apart = {mode: [] for mode in steps}, 0.0
    for turn in range(rounds + 3):
        losses = []
        for mode in list(steps) if turn % 2 else reversed(steps):
            began = time.process_time()
            losses.append(steps[mode][0](batch_of(turn)))
            seconds[mode].append(time.process_time() - began)
        apart = max(apart, abs(losses[0] - losses[1]) / losses[0])
    ratios = [ours / eager for ours, eager in zip(seconds["compile"][3:], seconds["eager"][3:])]
    return median(ratios), apart, steps["compile"][1]._vescale.captured.reasons()


def compiled_in(name: str, layers: int) -> float:
    """Seconds of the first two steps beyond those of the third and fourth."""
    torch.set_num_threads(1)
    torch.compiler.reset()
    step, _ = trained(name, "compile", layers)
    marks = [time.perf_counter()]
    for turn in range(4):
        step(batch_of(turn))
        marks.append(time.perf_counter())
    return (marks[2] - marks[0]) - (marks[4] - marks[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", nargs="+", choices=("tp", "zero3", "pp", "recomputed"), default=("tp", "zero3"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--deep", type=int, default=0)
    arguments = parser.parse_args()
    if shutil.which("c++") is None:
        print("skipped: inductor makes C++ on a CPU, and there is no compiler for it")
        return 0
    warnings.simplefilter("ignore")
    warm_up("torch._dynamo", "vescale", "transformers")
    figures: dict[str, dict] = {}
    met = True
    for name in arguments.plans:
        ratio, apart, reasons = run_ranks(2, raced, name, arguments.layers, arguments.rounds, timeout=1800)[0]
        if apart > 1e-5:
            raise SystemExit(f"{name}: the modes train other models: losses differ by {apart:.1e}")
        figures[name] = {"ratio": round(ratio, 3), "losses apart": apart, "eager": reasons}
        if arguments.deep:
            run_ranks(2, compiled_in, name, 1, timeout=1800)  # what is on disk afterwards is there for both
            deep, one = (run_ranks(2, compiled_in, name, layers, timeout=1800)[0] for layers in (arguments.deep, 1))
            figures[name]["deep"] = round(deep / one, 2)
        for what in BUDGETS.keys() & figures[name].keys():
            print(f"{name:<6} {what:<6} {figures[name][what]:.3f}  budget {BUDGETS[what]}", flush=True)
            met = met and figures[name][what] <= BUDGETS[what]
        met = met and not reasons
    print(json.dumps(figures))
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
