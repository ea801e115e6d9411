"""Published configurations: the planner's closed forms against step times that others reported, and their choices.

    python benchmarks/published.py [--json FILE] [--only TEXT]

For each row: the step time that the reported throughput means, what the cost model says for that configuration, and
where the configuration lies, by the model's time, among all degrees, microbatches and interleavings that fit the
machine, with what the model says is lost by it. Sequence parallelism, ZeRO and recomputation stay as reported: what a
system did not have, its authors could not choose. Degrees that were not reported are taken as the model has them
fastest.

The constants are those of the hardware profiles and of `vescale_plans.search.cost`; none is tuned here. But what the
model covers was extended after its misses on these rows were seen, those marked "aside" among them: only rows that
are not in this file are a blind check. Of the systems this is known: elementwise kernels are fused;
Megatron did not overlap the reduction of gradients in 2021 and 2022; its tensor ranks each send their share of the
positions to experts, once per node. Memory is the planner's own.

Structures are probed from models of transformers on the meta device. Not covered, and so left out: context
parallelism (Llama-3 405B at 131k), asynchronous tensor parallelism, expert overlap schedules. Experts over 32 ranks of
which some are tensor ranks ("Qwen3-235B, ep32") are taken as over the 16 data ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

import torch

BUDGETS = {"median error": 0.10, "recovered": 0.8}
GAIN = 0.05
"""Predicted regret within which a published configuration counts as found."""


@dataclass(frozen=True)
class Row:
    """A published run.

    Arguments:
        name, source: of the model and of the report.
        model: (family, sizes).
        hardware: profile.
        degrees: of the configuration, as `Candidate` has them.
        batch, seq: of a step, over all ranks.
        reported: (kind, value): "hardware TF" or "model TF" per GPU, or "tokens" per second and GPU.
        again: share of the forward that is computed again in backward: 1 full, 0.5 every second product, 0 none.
        aside: no constant was chosen with this row in view.
        overlaps: gradients are reduced beside the backward.
        unknown: the interleaving was not reported.
    """

    name: str
    source: str
    model: tuple
    hardware: str
    degrees: tuple[tuple[str, int], ...]
    batch: int
    seq: int
    reported: tuple[str, float]
    again: float = 0.0
    aside: bool = False
    overlaps: bool = True
    unknown: bool = False


def row(
    name, source, model, hardware, batch, seq, reported, again=0.0, aside=False, overlaps=True, unknown=False, **degrees
) -> Row:
    given = (name, source, model, hardware, tuple(degrees.items()), batch, seq, reported)
    return Row(*given, again, aside, overlaps, unknown)


def gpt_row(name, layers, hidden, heads, batch, mbs, tflops, aside=False, **degrees) -> Row:
    local = batch // degrees["dp"]
    return row(
        name, "SC21", ("gpt", layers, hidden, heads), "a100", batch, 2048, ("hardware TF", tflops), 1.0, aside,
        overlaps=False, microbatches=local // mbs, **degrees,
    )  # fmt: skip


def sp_row(name, layers, hidden, heads, batch, mbs, mfu, aside=False, **degrees) -> Row:
    return row(
        name, "arXiv 2205.05198", ("gpt", layers, hidden, heads), "a100", batch, 2048, ("model TF", 3.12 * mfu), 0.0,
        aside, overlaps=False, microbatches=batch // degrees.get("dp", 1) // mbs, sp=True, dp=1, **degrees,
    )  # fmt: skip


LLAMA = {
    "8B": ("llama", 32, 4096, 32, 8, 14336),
    "70B": ("llama", 80, 8192, 64, 8, 28672),
    "405B": ("llama", 126, 16384, 128, 8, 53248),
}
QWEN = ("qwen", 94, 4096, 64, 4, 1536, 128, 8)
ROWS = (
    gpt_row("GPT 1.7B", 24, 2304, 24, 512, 16, 137, dp=32),
    gpt_row("GPT 3.6B", 30, 3072, 32, 512, 16, 138, tp=2, dp=32),
    gpt_row("GPT 7.5B", 36, 4096, 32, 512, 16, 142, tp=4, dp=32),
    gpt_row("GPT 18B", 40, 6144, 48, 1024, 8, 135, tp=8, dp=32),
    gpt_row("GPT 39B", 48, 8192, 64, 1536, 4, 138, True, tp=8, pp=2, dp=32),
    gpt_row("GPT 76B", 60, 10240, 80, 1792, 2, 140, tp=8, pp=4, dp=32, virtual=3),
    gpt_row("GPT 145B", 80, 12288, 96, 2304, 2, 148, tp=8, pp=8, dp=24, virtual=2),
    gpt_row("GPT 310B", 96, 16384, 128, 2160, 1, 155, True, tp=8, pp=16, dp=15, virtual=2),
    gpt_row("GPT 530B", 105, 20480, 128, 2520, 1, 163, tp=8, pp=35, dp=9, virtual=3),
    gpt_row("GPT 1T", 128, 25600, 160, 3072, 1, 163, tp=8, pp=64, dp=6),
    sp_row("GPT 22B, sp", 48, 6144, 64, 4, 4, 41.5, tp=8),
    sp_row("GPT 175B, sp", 96, 12288, 96, 64, 1, 51.4, True, tp=8, pp=8, virtual=3),
    sp_row("GPT 530B, sp", 105, 20480, 128, 280, 1, 56.0, tp=8, pp=35, virtual=3),
    sp_row("GPT 1T, sp", 128, 25600, 160, 512, 1, 56.3, tp=8, pp=64),
    row("Llama-3 405B, 8k", "Llama 3", LLAMA["405B"], "h100", 2048, 8192, ("model TF", 430),
        unknown=True, tp=8, pp=16, dp=64, sp=True, zero=2, microbatches=32),
    row("Llama-3 405B, 16k", "Llama 3", LLAMA["405B"], "h100", 2048, 8192, ("model TF", 400), 0.0, True,
        unknown=True, tp=8, pp=16, dp=128, sp=True, zero=2, microbatches=16),
    row("Llama-3.1 8B, 8", "torchtitan", LLAMA["8B"], "h100-500w", 16, 8192, ("tokens", 6667), 0.5, dp=8, zero=3),
    row("Llama-3.1 8B, 128", "torchtitan", LLAMA["8B"], "h100-500w", 256, 8192, ("tokens", 6514), 0.5, True,
        dp=128, zero=3),
    row("Llama-3.1 70B, 256", "torchtitan", LLAMA["70B"], "h100-500w", 512, 8192, ("tokens", 597), 1.0,
        tp=8, dp=32, sp=True, zero=3),
    row("Llama-3.1 8B, tp8", "torchtitan", LLAMA["8B"], "h100-500w", 96, 8192, ("tokens", 4378), 0.5,
        tp=8, dp=8, sp=True, zero=3),
    row("Qwen3-235B, ep32", "MoE-ModelZoo", QWEN, "h100", 2048, 4096, ("model TF", 245), 0.0,
        tp=2, pp=8, dp=16, ep=16, virtual=4, sp=True, zero=1, microbatches=128),
    row("Qwen3-235B, fsdp", "MoE-ModelZoo", QWEN, "h100", 2048, 4096, ("model TF", 276), 1.0, True,
        tp=2, pp=1, dp=128, ep=8, sp=True, zero=3, microbatches=4),
    row("Qwen3-235B, pp32", "MoE-ModelZoo", QWEN, "h100", 2048, 4096, ("model TF", 200), 0.0,
        tp=2, pp=32, dp=4, ep=4, virtual=3, sp=True, zero=1, microbatches=512),
    row("Qwen3-235B, tp4", "MoE-ModelZoo", QWEN, "h100", 2048, 4096, ("model TF", 167), 0.0,
        tp=4, pp=8, dp=8, ep=8, virtual=4, sp=True, zero=1, microbatches=256),
)  # fmt: skip


VIRTUAL = (1, 2, 3, 4)
"""Interleaved stages per rank."""


@cache
def profile(name: str, overlaps: bool = True):
    """Fused kernels; the 500 W boards of torchtitan with HBM2e reach 0.85 of a H100 (planner's table of profiles)."""
    from vescale_plans.search import hardware_of

    if name == "h100-500w":
        base = profile("h100", overlaps)
        return replace(base, name=name, flops=0.85 * base.flops, bandwidth=2.4e12, memory=95 * 2**30)
    known = hardware_of(name)
    return replace(known, stream=8, hidden=known.hidden if overlaps else 0.0)


@cache
def structure(model: tuple):
    from vescale_plans.search import sample_of, structure_of

    with torch.device("meta"):
        built = BUILDERS[model[0]](*model[1:])
    return structure_of(built, sample_of(built))


def gpt(layers: int, hidden: int, heads: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=51200, n_positions=2048, n_embd=hidden, n_layer=layers, n_head=heads)
    )


def llama(layers: int, hidden: int, heads: int, groups: int, inner: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=groups, tie_word_embeddings=False,
        )
    )  # fmt: skip


def qwen(layers: int, hidden: int, heads: int, groups: int, inner: int, experts: int, chosen: int):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=151936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, head_dim=128,
            num_key_value_heads=groups, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=chosen,
        )
    )  # fmt: skip


BUILDERS = {"gpt": gpt, "llama": llama, "qwen": qwen}


# --- what was reported --------------------------------------------------------------------


def operations(one: Row) -> float:
    """Floating point operations of a step as the report counts them."""
    tokens, seq = one.batch * one.seq, one.seq
    if one.model[0] == "gpt":
        _, layers, hidden, _ = one.model
        passes = 96 if one.reported[0] == "hardware TF" else 72
        body = 1 + seq / (6 * hidden) + 51200 / ((16 if passes == 96 else 12) * layers * hidden)
        return passes * tokens * layers * hidden**2 * body
    _, layers, hidden, heads, groups, inner, *experts = one.model
    head = 128 if experts else hidden // heads
    words = 151936 if experts else 128256
    attention = 2 * hidden * head * (heads + groups)
    wide = 3 * hidden * inner * (experts[1] if experts else 1)
    products = 6 * (layers * (attention + wide) + words * hidden)
    return tokens * (products + 6 * layers * heads * head * seq)  # causal: half of every score


def reported_seconds(one: Row) -> float:
    """Of a step."""
    ranks = ranks_of(one)
    kind, value = one.reported
    if kind == "tokens":
        return one.batch * one.seq / (value * ranks)
    return operations(one) / (value * 1e12 * ranks)


# --- what the model says ------------------------------------------------------------------


def candidate_of(one: Row):
    """As reported; what was not reported as the model has it fastest."""
    from vescale_plans.search import Candidate

    known = Candidate(**dict(one.degrees))
    if not one.unknown:
        return known
    return min((replace(known, virtual=virtual) for virtual in VIRTUAL), key=lambda way: seconds(one, way))


def ranks_of(one: Row) -> int:
    degrees = dict(one.degrees)
    return degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("dp", 1)


def seconds(one: Row, candidate) -> float:
    """Of a step; partial recomputation lies between none and all."""
    return between(one.again, lambda again: step_seconds(one, again_in(candidate, again)))


def step_seconds(one: Row, candidate) -> float:
    """With blocks dealt out evenly over the stages, as the reports have it: the fullest one counts, which is the one
    with the head, or with a block more."""
    from vescale_plans.search import cost_of

    hardware, sizes = profile(one.hardware, one.overlaps), sizes_at(one.model, candidate.tp)
    sent = exchanged(one, candidate)
    cost = cost_of(sizes, candidate, hardware, one.batch, one.seq)
    cost = replace(cost, experts=cost.experts * sent)
    if candidate.pp == 1:
        return cost.total
    kinds, of = parts_at(one.model, candidate.tp)
    plain = replace(candidate, pp=1)
    priced = [cost_of(kind, plain, hardware, one.batch, one.seq) for kind in kinds]
    each = [replace(part, experts=part.experts * sent).busy / candidate.microbatches for part in priced]
    times, chunks = [each[kind] for kind in of], candidate.pp * candidate.virtual
    borders = [at * len(times) // chunks for at in range(chunks + 1)]
    stages = [0.0] * candidate.pp
    for at in range(chunks):
        stages[at % candidate.pp] += sum(times[borders[at] : borders[at + 1]])
    total, longest = sum(stages), max(stages)
    even = cost.busy / candidate.microbatches * (candidate.pp - 1) / candidate.virtual
    passes = candidate.microbatches * longest + (total - longest) / candidate.virtual
    return passes + cost.pipeline - even + cost.data + cost.optimizer


def exchanged(one: Row, candidate) -> float:
    """Rows that the report's system sends to experts, over those that ours does: of each tensor rank its share of the
    positions, and one copy for all experts of a node."""
    if candidate.ep == 1:
        return 1.0
    chosen, nodes = one.model[-1], max(1, candidate.tp * candidate.ep // profile(one.hardware).node)
    ours = chosen * (candidate.ep - 1) / candidate.ep
    theirs = min(chosen, nodes) * (nodes - 1) / nodes if nodes > 1 else ours
    return theirs / ours / candidate.tp


@cache
def parts_at(model: tuple, tp: int):
    """Sizes of each kind of block, and the kind of each; the first and the last hold what lies before and after."""
    from vescale_plans.search import parts_of

    kinds, of = [], []
    for part in parts_of(structure(model), tp):
        if part not in kinds:
            kinds.append(part)
        of.append(kinds.index(part))
    return kinds, of


def memory(one: Row, candidate) -> float:
    from vescale_plans.search import memory_of

    hardware, sizes = profile(one.hardware, one.overlaps), sizes_at(one.model, candidate.tp)
    return between(
        one.again, lambda again: memory_of(sizes, again_in(candidate, again), hardware, one.batch, one.seq).total
    )


def again_in(candidate, again: bool):
    return replace(candidate, checkpointing=again)


def between(share: float, value) -> float:
    """`value(True)` for a share of 1, `value(False)` for 0."""
    if share in (0.0, 1.0):
        return value(bool(share))
    return value(False) + share * (value(True) - value(False))


@cache
def sizes_at(model: tuple, tp: int):
    from vescale_plans.search import sizes_of

    return sizes_of(structure(model), tp)


def others(one: Row) -> Iterator:
    """The degrees that the planner chooses between, and what the reports use besides: parts of the batch one after the
    other without a pipeline, interleaved stages, experts spread under a pipeline."""
    from vescale_plans.search.candidates import Candidate, divisors

    built, reported = structure(one.model), Candidate(**dict(one.degrees))
    ranks, blocks = ranks_of(one), max(1, len(built.block_names))
    for tp in (1, *built.degrees):
        for pp in divisors(ranks // tp) if ranks % tp == 0 else ():
            dp = ranks // tp // pp
            if pp > blocks or one.batch % dp:
                continue
            local = one.batch // dp
            parts = [m for m in divisors(local) if pp <= m and local // m <= 16]
            stages = [v for v in VIRTUAL if pp * v <= blocks] if pp > 1 else [1]
            spread = [1, *(d for d in built.expert_degrees if dp % d == 0)]
            zero = reported.zero if dp > 1 and not (reported.zero == 3 and pp > 1) else min(reported.zero, 2) * (dp > 1)
            for microbatches in parts:
                for virtual in stages:
                    for ep in spread:
                        yield replace(
                            reported, pp=pp, dp=dp, tp=tp, ep=ep, zero=zero, microbatches=microbatches, virtual=virtual,
                            sp=reported.sp and tp > 1,
                        )  # fmt: skip


def compared(one: Row) -> dict:
    """One row's figures."""
    from vescale_plans.search.ranking import MARGIN

    published = candidate_of(one)
    predicted, measured = seconds(one, published), reported_seconds(one)
    limit = MARGIN * profile(one.hardware).memory
    priced = sorted(
        ((seconds(one, way), way) for way in others(one) if memory(one, way) <= limit), key=lambda pair: pair[0]
    )
    times = [time for time, _ in priced]
    place = sum(time < predicted * (1 - 1e-9) for time in times) + 1
    regret = predicted / times[0] - 1 if times else 0.0
    return {
        "row": one.name, "source": one.source, "aside": one.aside, "gpus": ranks_of(one),
        "configuration": str(published), "reported s": round(measured, 3), "predicted s": round(predicted, 3),
        "error": round(predicted / measured - 1, 4), "fits": memory(one, published) <= limit,
        "rank": place, "of": len(times), "regret": round(max(0.0, regret), 4),
        "found": place <= max(1, len(times) / 10) or regret <= GAIN,
        "fastest": str(priced[0][1]) if priced else None,
    }  # fmt: skip


def table(rows: list[dict]) -> Iterator[str]:
    yield "| run | GPUs | configuration | reported | predicted | error | rank by the model | regret |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in rows:
        aside = " *" * one["aside"]
        yield (
            f"| {one['row']}{aside} | {one['gpus']} | {one['configuration']} | {one['reported s']:.2f} s | "
            f"{one['predicted s']:.2f} s | {one['error']:+.0%} | {one['rank']} / {one['of']} | {one['regret']:.0%} |"
        )


def summed(rows: list[dict]) -> dict:
    errors = [abs(one["error"]) for one in rows]
    apart = [one for one in rows if one["aside"]]
    return {
        "rows": len(rows), "median error": round(median(errors), 4), "worst error": round(max(errors), 4),
        "recovered": round(sum(one["found"] for one in rows) / len(rows), 4), "rows aside": len(apart),
        "median error of these": round(median(abs(one["error"]) for one in apart), 4) if apart else None,
        "recovered of these": round(sum(one["found"] for one in apart) / len(apart), 4) if apart else None,
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
    for line in table(rows):
        print(line)
    record = summed(rows)
    print(json.dumps(record))
    return int(record["median error"] > BUDGETS["median error"] or record["recovered"] < BUDGETS["recovered"])


if __name__ == "__main__":
    sys.exit(main())
