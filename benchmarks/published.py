"""Published configurations: what the shipped planner says of runs that others reported, and what it would choose.

    python benchmarks/published.py [--json FILE] [--only TEXT] [--long]

Nothing is priced here: a configuration is priced by `Pricer`, and the choice is made by `rank`, as in `generate_plan`
and `vescale plan`, for a `Request` with the row's hardware. For each row: the step time that the reported throughput
means, the planner's for that configuration, whether the configuration is in the space that is searched (and why not),
whether it fits by the planner's own account, and what the planner chooses instead among plans with the row's sequence
parallelism, ZeRO stage and recomputation: what a system did not have, its authors could not choose.

What a row says of its system is data of its hardware: kernels are fused (`stream=8`; what they keep stands in
`published_kernels.py`), Megatron hid no communication in 2021 and 2022 (`hidden=0`) and wrote attention's scores to
memory (`scores`), its dispatcher sends rows to a node once (`once`), parameters are held in bfloat16 beside what the
optimizer steps (`numbers`), torchtitan's boards take 500 W. Megatron's Qwen3 keeps experts whole, spread over tensor
ranks as well, and two of its runs compute norms and experts' activations again (column "recompute" of the report).
Degrees that were not reported are taken as the planner has them fastest. torchtitan's half of a recomputation (of every
second product) stands as the selection of modules of which the products are nearest to half of the forward's: of
Llama's blocks the feed-forward part.

Blind rows. A row is blind if the constants were frozen before its figures were read. The protocol: (1) a commit holds
`frozen()`, the hash of the profiles and of the modules that price, in FROZEN, together with BLIND_SOURCES, public
reports of which no figure is in this file; (2) a later commit enters every run of these reports that qualifies
(hardware with a profile, degrees, batch and recomputation given, fused attention and norms, no fp8, no context
parallelism), whatever it says, in `published_blind.csv`, which `published_blind.py` prices; (3) the record says whether
the hash is still FROZEN. Of 2026-11-23 (fc53d4f6810b4d87) are the first three reports, of which an excerpt of
KempnerForge's and the best utilisation of Hagemann's had been seen. On
2026-11-24 the links of a group, the systems' kernels and numbers, and what a system hides were mended with these rows
in sight: they are SEEN, and say how well the terms describe, not how well they foretell. The same evening fms-fsdp's
four runs were entered under cd4c1f2efaad0502, before memory by formula was mended; and in its night the fifty of
NVIDIA's two reports under 26b030ad5e5ee424 (`results/2026-11-24-published-blind-night.json`). On 2026-11-25 a job over
several NVL72 racks was laid out by 64 of each, and memory by formula mended, with these in sight: they are SEEN as
well. On 2026-11-26 the 66 of four further reports were entered under b9c5206ed05184bd, and priced after
(`results/2026-11-26-published-blind.json`: 10.6% off in the median, 41% at worst, 64 fit). Then no computation hid
both a reduction and a gather any more, with these in sight (`results/2026-11-26-published-seen.json`): they are SEEN,
and there is no blind row now. FROZEN is the hash that the last were entered under; what of a source's recomputation its
page does not say, its recipes do.

`--long`: runs with context parallelism, apart from the others and counted by themselves; no constant was chosen by
them. torchtitan's have linear layers in fp8, which is not priced (they are priced as in bfloat16, so too slow where
products outweigh attention), and shard states over data and context axes together, where ours shards over one of the
two. That of Llama 3 does not report its interleaving.

Structures are probed from models of transformers on the meta device. Not covered, and so left out: asynchronous tensor
parallelism, expert overlap schedules, fp8. Experts over 32 ranks of which
some are tensor ranks ("Qwen3-235B, ep32") are taken as over the 16 data ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from statistics import median

import torch

from planning.published_kernels import with_attention, with_experts, with_gates, with_loss, with_norms

BUDGETS = {"median error": 0.08, "worst error": 0.25, "recovered": 0.8}
GAIN = 0.05
"""What the choice may gain, by the planner, over a published configuration that fits and counts as found."""


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
        scores: of `Hardware`, of attention that is not fused.
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
    scores: float = 0.0


def row(
    name, source, model, hardware, batch, seq, reported, again=0.0, aside=False, overlaps=True, unknown=False,
    scores=0.0, **degrees,
) -> Row:  # fmt: skip
    given = (name, source, model, hardware, tuple(degrees.items()), batch, seq, reported)
    return Row(*given, again, aside, overlaps, unknown, scores)


UNFUSED = 17 / 3
"""Reads and writes of the scores in a third of a forward and a backward, by Megatron's kernels before fused attention
(arXiv 2205.05198, figure 3): forward 6.5 of products, softmax and dropout with its mask, backward 10.5."""


def gpt_row(name, layers, hidden, heads, batch, mbs, tflops, aside=False, **degrees) -> Row:
    local = batch // degrees["dp"]
    return row(
        name, "SC21", ("gpt", layers, hidden, heads), "a100", batch, 2048, ("hardware TF", tflops), 1.0, aside,
        overlaps=False, microbatches=local // mbs, scores=UNFUSED * heads / hidden, **degrees,
    )  # fmt: skip


def sp_row(name, layers, hidden, heads, batch, mbs, mfu, aside=False, **degrees) -> Row:
    return row(
        name, "arXiv 2205.05198", ("gpt", layers, hidden, heads), "a100", batch, 2048, ("model TF", 3.12 * mfu), 0.0,
        aside, overlaps=False, microbatches=batch // degrees.get("dp", 1) // mbs, sp=True, dp=1,
        scores=UNFUSED * heads / hidden, **degrees,
    )  # fmt: skip


LLAMA = {
    "8B": ("compiled", 32, 4096, 32, 8, 14336),
    "70B": ("compiled", 80, 8192, 64, 8, 28672),
    "405B": ("compiled", 126, 16384, 128, 8, 53248),
}
QWEN = ("qwen", 94, 4096, 64, 4, 1536, 128, 8)
QWEN_AGAIN = ("qwen again", *QWEN[1:])
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
    row("Qwen3-235B, ep32", "MoE-ModelZoo", QWEN_AGAIN, "h100", 2048, 4096, ("model TF", 245), 0.0,
        tp=2, pp=8, dp=16, ep=16, virtual=4, sp=True, zero=1, microbatches=128),
    row("Qwen3-235B, fsdp", "MoE-ModelZoo", QWEN, "h100", 2048, 4096, ("model TF", 276), 1.0, True,
        tp=2, pp=1, dp=128, ep=8, sp=True, zero=3, microbatches=4),
    row("Qwen3-235B, pp32", "MoE-ModelZoo", QWEN_AGAIN, "h100", 2048, 4096, ("model TF", 200), 0.0,
        tp=2, pp=32, dp=4, ep=4, virtual=3, sp=True, zero=1, microbatches=512),
    row("Qwen3-235B, tp4", "MoE-ModelZoo", QWEN, "h100", 2048, 4096, ("model TF", 167), 0.0,
        tp=4, pp=8, dp=8, ep=8, virtual=4, sp=True, zero=1, microbatches=256),
)  # fmt: skip


LONG = (
    row("Llama-3 405B, 131k", "Llama 3", LLAMA["405B"], "h100", 128, 131072, ("model TF", 380), unknown=True,
        tp=8, cp=16, pp=16, dp=8, sp=True, zero=2, microbatches=16),
    *(
        row(f"Llama-3.1 8B, {seq // 1024}k, fp8", "torchtitan", LLAMA["8B"], "h100-500w", 8 // cp, seq,
            ("tokens", tokens), 1.0, dp=8 // cp, cp=cp, zero=3)
        for seq, cp, tokens in ((32768, 1, 3890), (65536, 2, 2540), (131072, 4, 1071), (262144, 8, 548))
    ),
)  # fmt: skip
"""Runs with context parallelism."""


VIRTUAL = (1, 2, 3, 4)
"""Interleaved stages per rank."""
MIXED = {"parameters": 2, "states": 12, "gradients": 4, "sums": 1, "stepping": 0, "everywhere": True}
"""What Megatron holds per parameter: it and its copy in float32 with both moments, and one sum of gradients."""
NUMBERS = {"torchtitan": {"sums": 1, "stepping": 0}, "Llama 3": {**MIXED, "summed_sharded": True}}
"""By source, where it is not MIXED: torchtitan shards parameters in float32 and steps them by a fused kernel. Llama 3's
pipeline keeps parameters gathered and shards optimizer states and gradients (arXiv 2407.21783, section 3.3.2)."""
FROZEN = "b9c5206ed05184bd"
SEEN = (
    "llm-foundry", "KempnerForge", "arXiv 2311.05610", "fms-fsdp", "dgxc-benchmarking", "Megatron-Bridge",
    "FlagPerf-Paddle", "FlagPerf-Megatron", "FlagPerf-DeepSpeed", "YaFSDP", "YaFSDP's FSDP", "JAX-Toolbox",
    "gpu-recipes",
)  # fmt: skip
"""Blind once: llm-foundry's scripts/train/benchmarking, KempnerForge's benchmarks/mfu_scaling, the sheets of Hagemann's
paper, foundation-model-stack/fms-fsdp's README.md, NVIDIA/dgxc-benchmarking's READMEs, and
NVIDIA-NeMo/Megatron-Bridge's docs/performance-summary.md with its archive, in bfloat16. Named with the last two were
yanring/Megatron-MoE-ModelZoo's best practices of DeepSeek-V3 and Mixtral, of which no run was entered. The last seven
are of BLIND_SOURCES."""
BLIND_SOURCES = (
    "FlagOpen/FlagPerf, READMEs and configurations of training/nvidia's language models: on A100 80 GB and H100",
    "yandex/YaFSDP, README.md: FSDP and YaFSDP on A100 80 GB",
    "NVIDIA/JAX-Toolbox, READMEs of Pax and MaxText, the newest that give figures: bfloat16",
    "AI-Hypercomputer/gpu-recipes, READMEs of training with a step's time of a named configuration: bfloat16",
)
"""Of the last blind rows, chosen by the headings of their tables, with every digit of these masked. A run qualifies in
bfloat16 or float16, which these GPUs multiply equally fast."""
PRICES = ("cost", "hardware", "interleaved", "memory", "profiles", "sizes")
PRICING = ("candidates", "ranking", "stages", *(f"pricing/{name}" for name in PRICES))


def frozen() -> str:
    """Of all that a price depends on: the profiles, and the modules that price (hex, 16 digits)."""
    from vescale_plans import search

    folder = Path(search.__file__).parent
    texts = [(folder / f"{name}.py").read_bytes() for name in PRICING]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


@cache
def profile(name: str, overlaps: bool = True):
    """Fused kernels; the 500 W boards of torchtitan with HBM2e reach 0.85 of a H100 (planner's table of profiles)."""
    from vescale_plans.search import hardware_of

    if name == "h100-500w":
        base = profile("h100", overlaps)
        return replace(base, name=name, flops=0.85 * base.flops, bandwidth=2.4e12, memory=95 * 2**30)
    known = hardware_of(name)
    return replace(known, stream=8, hidden=known.hidden if overlaps else 0.0, once=True)


@cache
def structure(model: tuple):
    from vescale_plans.search import sample_of, structure_of

    with torch.device("meta"):
        built = BUILDERS[model[0]](*model[1:])
    return structure_of(built, sample_of(built))


def gpt(layers: int, hidden: int, heads: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=51200, n_positions=2048, n_embd=hidden, n_layer=layers, n_head=heads,
            activation_function="gelu_pytorch_tanh",  # one kernel; "gelu_new" keeps a tensor for each of its operators
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,  # fused attention
        )
    )  # fmt: skip


def llama(*sizes: int):
    return with_norms(stock(*sizes))


def stock(layers: int, hidden: int, heads: int, groups: int, inner: int, words: int = 128256):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=groups, tie_word_embeddings=False,
        )
    )  # fmt: skip


def llama2(*sizes: int):
    """Of 32,000 words, and with every norm written out, as eager code has it."""
    return stock(*sizes, words=32000)


def compiled(*sizes: int):
    """A Llama by a system whose gates and loss are one kernel as well."""
    return with_loss(with_gates(llama(*sizes)))


def mpt(*sizes: int):
    """GPT-2's blocks, with llm-foundry's fused loss."""
    return with_loss(gpt(*sizes))


def qwen(
    layers: int, hidden: int, heads: int, groups: int, inner: int, experts: int, chosen: int, again: bool = False
):  # fmt: skip
    """By Megatron; `again`: what norms and experts' activations give is computed again."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    made = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=151936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, head_dim=128,
            num_key_value_heads=groups, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=chosen,
        )
    )  # fmt: skip
    return with_loss(with_experts(with_norms(made, again), again))


def qwen_again(*sizes: int):
    return qwen(*sizes, again=True)


def nemotron(layers: int, hidden: int, heads: int, groups: int, inner: int):
    """Nemotron-4."""
    from transformers import NemotronConfig, NemotronForCausalLM

    return with_loss(NemotronForCausalLM(
        NemotronConfig(
            vocab_size=256000, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=groups, tie_word_embeddings=False,
        )
    ))  # fmt: skip


def grok(
    layers: int, hidden: int, heads: int, groups: int, inner: int, experts: int, chosen: int, words: int = 131072
):  # fmt: skip
    """Mixtral's blocks, also with Grok-1's sizes."""
    from transformers import MixtralConfig, MixtralForCausalLM

    made = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=words, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=groups, num_local_experts=experts,
            num_experts_per_tok=chosen,
        )
    )  # fmt: skip
    return with_loss(with_experts(with_norms(made), False))


def deepseek():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return with_loss(with_experts(with_norms(DeepseekV3ForCausalLM(DeepseekV3Config())), False))


def gpt_oss():
    """Of 120B. Attention without the sinks, and over all pairs in every layer: in every second one it is a window."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return with_loss(with_norms(with_attention(GptOssForCausalLM(GptOssConfig(num_hidden_layers=36)))))


BUILDERS = {"gpt": gpt, "mpt": mpt, "llama": llama, "llama2": llama2, "compiled": compiled}
BUILDERS |= {"qwen": qwen, "qwen again": qwen_again, "nemotron": nemotron, "grok": grok}
BUILDERS |= {"deepseek": deepseek, "gpt-oss": gpt_oss, "stock": stock}


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


# --- what the planner says ----------------------------------------------------------------


def request_of(one: Row):
    """As `generate_plan` would have it, with what the system of the row had."""
    from vescale_plans.search import Candidate, Request
    from vescale_plans.search.pricing.hardware import Numbers
    from vescale_plans.search.ranking import MARGIN

    numbers, known = Numbers(**NUMBERS.get(one.source, MIXED)), Candidate(**dict(one.degrees))
    hardware = replace(profile(one.hardware, one.overlaps), scores=one.scores, numbers=numbers)
    pin = {"sp": known.sp} if known.sp else {}
    forbid = () if known.sp else ("sp",)
    if known.replicas > 1:
        pin["zero"] = known.zero
    if one.again in (0.0, 1.0):
        pin |= {"checkpointing": bool(one.again), "inside": ()}
    limit = MARGIN * hardware.memory
    return Request(
        structure(one.model), ranks_of(one), one.batch, one.seq, hardware, limit, "time", pin, forbid, torch.bfloat16
    )


def candidate_of(one: Row, pricer):
    """As reported; what was not reported as the planner has it fastest."""
    from vescale_plans.search import Candidate

    known = replace(Candidate(**dict(one.degrees)), checkpointing=one.again > 0)
    if one.again not in (0.0, 1.0):
        known = replace(known, inside=selection(one, known))
    if not one.unknown:
        return known
    ways = [replace(known, virtual=virtual) for virtual in VIRTUAL]
    return min(ways, key=lambda way: pricer.evenly(way).cost.total)


def selection(one: Row, candidate) -> tuple[str, ...]:
    """Modules of a block whose products are nearest to the share of the forward's that the row computes again."""
    from vescale_plans.search.pricing.cost import again_of, pass_of
    from vescale_plans.search.pricing.sizes import sizes_of

    found = structure(one.model)
    shape = (profile(one.hardware, one.overlaps), one.batch, one.seq)
    sizes = sizes_of(found, candidate.tp)
    forward = pass_of(sizes, candidate, *shape).compute

    def off(inside: tuple[str, ...]) -> float:
        again = again_of(sizes, replace(candidate, checkpointing=True, inside=inside), *shape).compute
        return abs(again / forward - one.again)

    return min(found.selections, key=off)


def ranks_of(one: Row) -> int:
    degrees = dict(one.degrees)
    return prod(degrees.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))


def priced(pricer, candidate) -> tuple[float, float]:
    """(seconds, bytes), with blocks dealt out evenly, as the reports have it."""
    found = pricer.evenly(candidate)
    return found.cost.total, found.memory.total


def outside(one: Row, legal: list, candidate) -> list[str]:
    """Why the configuration is not among those that are searched; empty where it is."""
    plain, parts = replace(candidate, inside=()), len(structure(one.model).cut_points) + 1
    if (stages := candidate.pp * candidate.virtual) > parts:
        return [f"{stages} stages of {parts} blocks"]
    return ["degrees"] * (plain not in legal)  # which modules is not written out, and one of `selections` is


def compared(one: Row) -> dict:
    """One row's figures."""
    from vescale_plans.search import InfeasibleError, rank
    from vescale_plans.search.pricer import Pricer

    request = request_of(one)
    pricer, legal = Pricer(request), request.candidates()
    published = candidate_of(one, pricer)
    predicted, size = priced(pricer, published)
    measured = reported_seconds(one)
    try:
        best = rank(request)[0]
    except InfeasibleError:
        best = None
    regret = predicted / best.cost.total - 1 if best else 0.0
    return {
        "row": one.name, "source": one.source, "aside": one.aside, "gpus": ranks_of(one),
        "configuration": str(published), "reported s": round(measured, 3), "predicted s": round(predicted, 3),
        "error": round(predicted / measured - 1, 4), "GiB": round(size / 2**30, 1), "fits": size <= request.limit,
        "outside": outside(one, legal, published), "searched": len(legal), "chosen": best and str(best.candidate),
        "chosen s": best and round(best.cost.total, 3), "regret": round(max(0.0, regret), 4),
        "found": size <= request.limit and regret <= GAIN,
    }  # fmt: skip


def table(rows: list[dict]) -> Iterator[str]:
    yield "| run | GPUs | configuration | reported | predicted | error | searched | fits | gain of the chosen plan |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in rows:
        inside = "no: " + ", ".join(one["outside"]) if one["outside"] else "yes"
        fits = f"{one['GiB']} GiB" + ", no" * (not one["fits"])
        times = f"{one['reported s']:.2f} s | {one['predicted s']:.2f} s | {one['error']:+.0%}"
        run = f"{one['row']}{' *' * one['aside']} | {one['gpus']} | {one['configuration']}"
        yield f"| {run} | {times} | {inside} | {fits} | {one['regret']:.0%} |"


def summed(rows: list[dict]) -> dict:
    errors = [abs(one["error"]) for one in rows]
    apart = [one for one in rows if one["aside"]]
    return {
        "rows": len(rows), "constants": frozen(), "frozen": frozen() == FROZEN,
        "median error": round(median(errors), 4), "worst error": round(max(errors), 4),
        "searched": sum(not one["outside"] for one in rows), "fits": sum(one["fits"] for one in rows),
        "recovered": round(sum(one["found"] for one in rows) / len(rows), 4), "rows aside": len(apart),
        "median error of these": round(median(abs(one["error"]) for one in apart), 4) if apart else None,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="rows that the file has are not computed again")
    parser.add_argument("--only", default="")
    parser.add_argument("--long", action="store_true", help="the runs with context parallelism")
    arguments = parser.parse_args()
    path = Path(arguments.json) if arguments.json else None
    known = {one["row"]: one for one in json.loads(path.read_text())["table"]} if path and path.exists() else {}
    rows = []
    for one in LONG if arguments.long else ROWS:
        if arguments.only in one.name:
            rows.append(known.get(one.name) or compared(one))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if path:
                path.write_text(json.dumps({**summed(rows), "table": rows}, indent=1) + "\n")
    for line in table(rows):
        print(line)
    record = summed(rows)
    print(json.dumps(record))
    errors = ("median error", "worst error")
    if arguments.long:
        return 0  # told, with no budget
    return int(any(record[name] > BUDGETS[name] for name in errors) or record["recovered"] < BUDGETS["recovered"])


if __name__ == "__main__":
    sys.exit(main())
