"""Blind rows, and such as were blind once: runs of reports that no constant was chosen by when they were entered.

    python benchmarks/planning/published_blind.py [--json FILE]

`published.py` states the protocol and holds the frozen hash; `published_blind.csv` holds every run of the reports that
qualifies, entered after the hash was, and those that ran out of memory, which have no seconds. A configuration is
priced as it was reported, with blocks dealt out evenly, for the system as its report has it: FSDP's reductions run
beside the backward, those of arXiv 2311.05610 (ZeRO-1, at the end of the step) do not; llm-foundry's norms and
elementwise operators are torch's own, its loss is one kernel, and its attention the kernels of 2023. Of the memory it
is counted how often the planner says of a run that it fits, and of one that did not that it does not.

Taken from the reports' texts or derived from their figures: of arXiv 2311.05610 the batch (2,048 rows of 2,048
positions, 512 of 8,192) and the table of 128,000 words, which its utilisation and step times agree with; MPT by GPT-2's
blocks, with tied tables and learned positions, as its counts of parameters show. fms-fsdp shards its 7B and 13B over
the eight of a node and copies them over nodes, which no candidate does: they stand as sharded over all, as does
MaxText's 70B on 512 GPUs and more, of dgxc-benchmarking. Of a configuration that several versions of a README have, the
newest one's figure is entered; of Nemotron-4 340B on 512 and more GPUs in the README of both sizes the interleaving is
not given, and Grok-1's and Llama 3.1's runs on H100 cut sequences. NeMo sends beside products what its tensor axis
sends (user buffers), which is not priced. MaxText computes again what enters the second product of feed-forward parts;
that stands as all of these parts. DeepSeek-V3 computes its products up from latents again, which is left out, and has
no extra prediction layer. Without recomputation in its page or its recipe a run does not qualify (Paxml's, of
dgxc-benchmarking).

Of the four reports of 2026-11-26: FlagPerf's runs on A800, H800 and A100 of 40 GB are of GPUs without a profile;
Paddle's are in float16; neither its sharding nor the Megatron scripts have their options for overlap; of Mixtral the
page's degrees count, with which those of the script are not possible; ChatGLM3 stands in Llama's blocks. YaFSDP's page
has both systems' times, of models as transformers has them by its example; both stand. JAX-Toolbox's 126M had no fused
attention, its LoRA trains no model; its Llama's rows are padded to 4,096 positions, and all of them stand. Pax has its
recomputation in google/paxml. gpu-recipes' pages show one step of the default configuration; those that show a step of
another recipe, of fp8 or with context parallelism are left out. What computes again all but products with parameters
(Pax's 5B, MaxText's minimal and custom policies, Megatron's selective one) stands as nothing again, and groups that
shard within a node and copy over nodes as sharded over all, as before.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from published import FROZEN, LLAMA, MIXED, QWEN, SEEN, frozen, profile, structure
from vescale_plans.search import Candidate, Request
from vescale_plans.search.pricer import Pricer
from vescale_plans.search.pricing.hardware import Numbers
from vescale_plans.search.ranking import MARGIN

GOALS = {"median error": 0.10, "worst error": 0.25}
MIXTRAL = (32, 4096, 32, 8, 14336, 8, 2)
MODELS = {
    "mpt-125m": ("mpt", 12, 768, 12), "mpt-350m": ("mpt", 24, 1024, 16), "mpt-760m": ("mpt", 24, 1536, 12),
    "mpt-1b": ("mpt", 24, 2048, 16), "mpt-3b": ("mpt", 32, 2560, 20), "mpt-7b": ("mpt", 32, 4096, 32),
    "mpt-13b": ("mpt", 40, 5120, 40), "mpt-30b": ("mpt", 48, 7168, 56), "mpt-70b": ("mpt", 80, 8192, 64),
    "forge-7B": ("llama", *LLAMA["8B"][1:]), "forge-13B": ("llama", 40, 5120, 40, 8, 17920),
    "forge-70B": ("llama", *LLAMA["70B"][1:]),
    "llama-13B": ("llama", 40, 5120, 40, 40, 13824), "llama-30B": ("llama", 60, 6656, 52, 52, 17920),
    "llama-65B": ("llama", 80, 8192, 64, 64, 22016), "llama2-7B": ("llama2", 32, 4096, 32, 32, 11008),
    "llama2-13B": ("llama2", 40, 5120, 40, 40, 13824), "llama2-34B": ("llama2", 48, 8192, 64, 8, 22016),
    "llama2-70B": ("llama2", 80, 8192, 64, 8, 28672),
    "gpt3-175B": ("gpt", 96, 12288, 96), "nemotron-15B": ("nemotron", 32, 6144, 48, 8, 24576),
    "nemotron-340B": ("nemotron", 96, 18432, 96, 8, 73728), "grok-314B": ("grok", 64, 6144, 48, 8, 32768, 8, 2),
    "maxtext-70B": ("compiled", 80, 8192, 64, 8, 28672, 32000), "qwen3-235B": QWEN, "deepseek-v3": ("deepseek",),
    "gpt-oss-120B": ("gpt-oss",),
    "paddle-llama-7B": ("llama", 32, 4096, 32, 32, 11008, 32000),
    "paddle-llama-13B": ("llama", 40, 5120, 40, 40, 13824, 32000),
    "paddle-gpt-6.7B": ("gpt", 32, 4096, 32), "paddle-gpt-13B": ("gpt", 40, 5120, 128),
    "llama3-8B": LLAMA["8B"], "llama3-70B": LLAMA["70B"], "mixtral": ("grok", *MIXTRAL, 32000),
    "eager-llama3-8B": ("stock", *LLAMA["8B"][1:]), "eager-llama3-70B": ("stock", *LLAMA["70B"][1:]),
    "pax-5B": ("mpt", 24, 4096, 32), "xla-llama2-7B": ("compiled", 32, 4096, 32, 32, 11008, 32000),
    "xla-llama3-70B": LLAMA["70B"], "xla-mixtral": ("grok", *MIXTRAL, 32000),
    "nemo-mixtral": ("grok", *MIXTRAL, 50304), "chatglm3-6B": ("stock", 28, 4096, 32, 2, 13696, 65024),
}  # fmt: skip
LATE = ("arXiv 2311.05610", "FlagPerf-Paddle", "FlagPerf-Megatron")
"""Whose gradients are reduced when the last backward is through, or nothing is computed meanwhile."""
EAGER = ("llm-foundry", "fms-fsdp", "FlagPerf-Paddle", "FlagPerf-DeepSpeed", "YaFSDP", "YaFSDP's FSDP")
"""Whose elementwise operators and norms are torch's own, one kernel each: no compiler, no fused modules."""
ATTENTION = {("llm-foundry", "h100"): 0.35}
"""Of kernels of a report's time: the first FlashAttention under a causal mask, both directions together, reached some
130e12 on a H100 (arXiv 2307.08691, figure 7), of half the pairs."""
NUMBERS_OF = {
    "arXiv 2311.05610": Numbers(parameters=2, states=12, gradients=2, sums=1, stepping=0),
    "KempnerForge": Numbers(sums=1, stepping=0),
    "llm-foundry": Numbers(sums=1, stepping=0),
    "dgxc-benchmarking": Numbers(**MIXED),
    "Megatron-Bridge": Numbers(**MIXED),
    "maxtext-70B": Numbers(sums=1, stepping=0),
    "FlagPerf-Paddle": Numbers(parameters=2, states=12, gradients=2, sums=1, stepping=0),
    "FlagPerf-Megatron": Numbers(**MIXED),
    "FlagPerf-DeepSpeed": Numbers(parameters=2, states=12, gradients=2, sums=1, stepping=0),
    "YaFSDP": Numbers(sums=1),
    "YaFSDP's FSDP": Numbers(sums=1),
    "JAX-Toolbox": Numbers(sums=1, stepping=0),
    "gpu-recipes": Numbers(sums=1, stepping=0),
    "xla-mixtral": Numbers(parameters=2, states=4, gradients=2, sums=1, stepping=0),
    "nemo-mixtral": Numbers(**MIXED),
}
"""What its system, or that of one of its models, holds per parameter: the first in bfloat16, with what the optimizer
steps in float32; fused steps.
torch's FSDP adds a unit's shard to the sum of earlier backwards as soon as it is reduced."""
NODES = {"KempnerForge": 4}
"""Devices of a node, where they are not the profile's."""
ACROSS = {("gpu-recipes", "h100"): 22e9}
"""Bytes per second of a GPU's link to other nodes, where it is not the profile's: A3 Mega's have 200 Gb/s each."""
NUMBERS = ("tp", "pp", "zero", "microbatches", "virtual", "ep")


def runs() -> Iterator[dict[str, str]]:
    with Path(__file__).with_suffix(".csv").open() as file:
        yield from csv.DictReader(file)


def candidate_of(run: Mapping[str, str]) -> Candidate:
    """`again`: 0 of no block, 1 of all, "3/32" of three of 32, or which modules of each."""
    degrees = {name: int(run[name]) for name in NUMBERS}
    dp = int(run["gpus"]) // degrees["tp"] // degrees["pp"]
    again = run["again"]
    inside = () if again in "01" or "/" in again else (again,)
    return Candidate(**degrees, dp=dp, sp=run["sp"] == "1", checkpointing=again != "0", inside=inside)


@cache
def pricer_of(report: str, model: str, hardware: str, gpus: int, batch: int, seq: int) -> Pricer:
    known = profile(hardware, report not in LATE)
    known = replace(
        known,
        node=NODES.get(report, known.node),
        across=replace(known.across, bandwidth=ACROSS.get((report, hardware), known.across.bandwidth)),
        stream=17 if report in EAGER else known.stream,
        attention=ATTENTION.get((report, hardware), known.attention),
        numbers=NUMBERS_OF.get(model) or NUMBERS_OF.get(report, known.numbers),
    )
    limit = MARGIN * known.memory
    return Pricer(Request(structure(MODELS[model]), gpus, batch, seq, known, limit, dtype=torch.bfloat16))


def priced(run: Mapping[str, str]) -> tuple[float, float, float]:
    """What the planner says of it, seconds and bytes, and the bytes that it may fill. Time and memory of some blocks
    that are computed again lie between those of none and of all."""
    sizes = (int(run[name]) for name in ("gpus", "batch", "seq"))
    pricer, known = pricer_of(run["report"], run["model"], run["hardware"], *sizes), candidate_of(run)
    whole, share = pricer.evenly(known), float(Fraction(run["again"])) if "/" in run["again"] else 1.0
    none = pricer.evenly(replace(known, checkpointing=False)) if share < 1 else whole
    seconds = none.cost.total + share * (whole.cost.total - none.cost.total)
    return seconds, none.memory.total + share * (whole.memory.total - none.memory.total), pricer.request.limit


def compared(run: Mapping[str, str]) -> dict:
    seconds, size, limit = priced(run)
    ran, plan = bool(run["seconds"]), str(candidate_of(run))
    some = f" of {run['again']} blocks" if "/" in run["again"] else ""
    return {
        "report": run["report"], "run": f"{run['model']} {run['hardware']} {run['gpus']}", "seq": int(run["seq"]),
        "plan": plan + some, "predicted s": round(seconds, 3), "ran": ran,
        "error": round(seconds / float(run["seconds"]) - 1, 4) if ran else None,
        "GiB": round(size / 2**30, 1), "fits": size <= limit,
    }  # fmt: skip


def summed(table: list[dict]) -> dict:
    errors = [one["error"] for one in table if one["ran"]]
    ran, died = ([one["fits"] for one in table if one["ran"] == ran] for ran in (True, False))
    off = sorted(map(abs, errors))
    return {
        "runs": len(errors), "median error": round(median(off), 4), "worst error": off[-1],
        "nine of ten within": off[len(off) * 9 // 10], "median, with its sign": round(median(errors), 4),
        "fits, of those that ran": [sum(ran), len(ran)],
        "does not fit, of those that ran out of memory": [len(died) - sum(died), len(died)],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json")
    path = parser.parse_args().json
    table = [compared(run) for run in runs()]
    names = dict.fromkeys(one["report"] for one in table)
    reports = {name: [one for one in table if one["report"] == name] for name in names}
    blind = [one for name, part in reports.items() if name not in SEEN for one in part]
    record = {"constants": frozen(), "frozen": frozen() == FROZEN, "goals": GOALS, **summed(blind or table)}
    record["seen"] = summed([one for one in table if one["report"] in SEEN])
    record["reports"] = {name: summed(part) for name, part in reports.items()}
    if path:
        Path(path).write_text(json.dumps({**record, "table": table}, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return int(bool(blind) and (not record["frozen"] or any(record[name] > most for name, most in GOALS.items())))


if __name__ == "__main__":
    sys.exit(main())
