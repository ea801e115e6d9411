"""(h) A Llama's training step on one device: plain torch, eager and compiled, and ours in each mode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import vescale

from .part import Part, run

ROUNDS, WARM = 10, 8
WAYS = ("torch", "torch, compiled", "ours, eager", "ours, compile")
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative, of the last loss: compiled kernels round otherwise


def model_of(sizes: dict[str, int], vocabulary: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, num_key_value_heads=sizes["num_attention_heads"] // 2, **sizes)
    )


def stepper(way: str, model: nn.Module, tokens: torch.Tensor, fused: bool) -> Callable[[], torch.Tensor]:
    make = partial(torch.optim.AdamW, lr=1e-4, fused=fused)
    if way.startswith("ours"):
        plan = vescale.Plan(mesh={"dp": 1}, parameters={"*": {}})
        make = partial(make, capturable=True) if way.endswith("to graphs") else make
        model, optimizer = vescale.parallelize(plan, model, make, mode=way.removeprefix("ours, ").split()[0])
    else:
        if way == "FSDP2":
            for block in model.model.layers:
                fully_shard(block)
            fully_shard(model)
        optimizer = make(model.parameters())
        compiled = {"torch, compiled": None, "torch, compiled to graphs": "reduce-overhead"}
        model = torch.compile(model, mode=compiled[way]) if way in compiled else model

    def step() -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return vescale.graphed(step, model, optimizer) if way == "ours, compile to graphs" else step


def raced(
    device: str, sizes: dict[str, int], dtype: torch.dtype, batch: tuple[int, int], ways: tuple[str, ...] = WAYS
) -> dict[str, Any]:
    """Milliseconds of a step, medians of rounds in turn, over plain torch's; the last loss, relative to its; and on a
    GPU, the MiB that a step allocates at most beside what stays between steps."""
    vocabulary = 32000 if device == "cuda" else 64
    tokens = torch.randint(vocabulary, batch, device=device)
    found: dict[str, Any] = {}
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    peaks: dict[str, int] = {}
    for way in ways if device == "cuda" else [way for way in ways if "compile" not in way]:
        try:
            step = stepper(way, model_of(sizes, vocabulary).to(device, dtype), tokens, fused=device == "cuda")
            for _ in range(WARM):
                step()
            steps[way] = step
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                stays = torch.cuda.memory_allocated()
                step()
                peaks[way] = (torch.cuda.max_memory_allocated() - stays) >> 20
        except Exception as error:
            found[way] = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
    times: dict[str, list[float]] = {way: [] for way in steps}
    losses: dict[str, float] = {}
    for _ in range(ROUNDS):
        for way, step in steps.items():
            began = time.perf_counter()
            losses[way] = float(step())  # waits for the device
            times[way].append(1e3 * (time.perf_counter() - began))
    for way, took in times.items():
        milliseconds = statistics.median(took)
        found[way] = {
            "ms": round(milliseconds, 3),
            "ratio": round(milliseconds / statistics.median(times["torch"]), 3),
            "tokens per second": round(tokens.numel() / milliseconds * 1e3),
            "loss off": abs(losses[way] / losses["torch"] - 1),
        } | ({"peak MiB": peaks[way]} if peaks else {})
    holds = all("failed" not in one and one["loss off"] <= WITHIN[dtype] for one in found.values())
    return {"holds": holds, **found}


def alike(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Losses of a few steps by kernels that give the same numbers each time: to the bit plain torch's."""
    vocabulary = 64
    tokens = torch.randint(vocabulary, (2, 64), device=device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = {}
        for way in [way for way in WAYS if "compile" not in way]:
            step = stepper(way, model_of(SMALL, vocabulary).to(device, dtype), tokens, fused=device == "cuda")
            found[way] = [step().item() for _ in range(WARM)]
    finally:
        torch.use_deterministic_algorithms(False)
    other = [way for way, losses in found.items() if losses != found["torch"]]
    return {"holds": not other, "other bits": other, "losses": found["torch"]}


def ask(part: Part) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        part.each(f"{name}, to the bit", lambda dtype=dtype: alike(part.device, dtype))
    large = part.device == "cuda"
    sizes, batch = (LARGE, (4, 1024)) if large else (SMALL, (2, 8))
    for dtype in (torch.bfloat16, torch.float32) if large else (torch.float32,):
        part.each(str(dtype).removeprefix("torch."), lambda dtype=dtype: raced(part.device, sizes, dtype, batch))


if __name__ == "__main__":
    run(ask)
