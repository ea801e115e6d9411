"""(i) HuggingFace's `attn_implementation` with the device's own kernels: TP 2 and one device train alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import vescale
from vescale_testkit import run_ranks

from .part import Part, run

VOCABULARY, BATCH, POSITIONS, STEPS = 64, 2, 128, 3
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
WITHIN = 1e-5  # relative, of each loss
SECONDS = 120  # of a world


def built(implementation: str) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=48, attn_implementation=implementation))


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (BATCH, POSITIONS), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 100:] = 0
        labels = ids.masked_fill(mask == 0, -100).to(device)
        loss = model(input_ids=ids.to(device), attention_mask=mask.to(device), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def trained(implementation: str, device: str) -> list[float]:
    model = built(implementation).to(device)
    plan = vescale.Plan.from_huggingface(model, mesh={"tp": 2})
    model, optimizer = vescale.parallelize(plan, model, partial(torch.optim.AdamW, lr=1e-3))
    return losses(model, optimizer, device)


def held(implementation: str, device: str) -> dict[str, Any]:
    if implementation == "flex_attention" and device == "second":
        return {"not run": "torch trains flex_attention on accelerators that it compiles for"}
    world = "second" if device == "second" else "cpu"  # gloo: ranks share one GPU
    ranks = run_ranks(2, trained, implementation, device, timeout=SECONDS, device=world)
    alone = built(implementation).to(device)
    wanted = losses(alone, torch.optim.AdamW(alone.parameters(), lr=1e-3), device)
    off = max(abs(a - b) / abs(b) for found in ranks for a, b in zip(found, wanted))
    return {"holds": off <= WITHIN, "loss": off, "within": WITHIN}


def ask(part: Part) -> None:
    for implementation in IMPLEMENTATIONS:
        part.each(implementation, partial(held, implementation, part.device))


if __name__ == "__main__":
    run(ask)
