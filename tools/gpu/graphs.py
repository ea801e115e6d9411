"""(l) Whole steps from a graph against the same steps run eagerly: losses, norms, parameters and the generator, to the
bit, over fifty steps. On one rank in both modes, and with collectives in the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import vescale
from vescale import Boundary, Plan, Replicate, Shard, graphed, parallelize
from vescale_testkit import run_ranks, worker

from .part import Part, run

STEPS, ROWS, LENGTH, WIDTH, WORDS = 50, 4, 32, 64, 128
SECONDS = 240
ONE: dict[str, Any] = {"mesh": {"dp": 1}}
DP: dict[str, Any] = {"mesh": {"dp": 2}, "data_axis": "dp"}
LEFT, RIGHT = {"tp": Shard(0)}, {"tp": Shard(1)}
TP: dict[str, Any] = {
    "mesh": {"tp": 2}, "parameters": {"*.up.*": LEFT, "*.down.weight": RIGHT, "*": {}},
    "boundaries": {"blocks.*.down": Boundary(input={}, output={"tp": Replicate()})},
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], str, float]] = {  # the plan, the mode, how much is dropped
    "one rank": (ONE, "eager", 0.1), "one rank, compile": (ONE, "compile", 0.1), "tp 2": (TP, "eager", 0.0),
    "tp 2, dropout": (TP, "eager", 0.1), "tp 2, compile": (TP, "compile", 0.0),
    **{f"dp 2, zero {zero}": (DP | {"zero": zero}, "eager", 0.1) for zero in (0, 2, 3)},
    "dp 2, zero 3, compile": (DP | {"zero": 3}, "compile", 0.0),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropped)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(dropped) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def trained(name: str, is_graphed: bool) -> tuple[list, list[str]]:
    """What each step returns and leaves in the end, and why the last ones were eager."""
    fields, mode, dropped = CASES[name]
    torch.manual_seed(0)
    model = Model(dropped).to(worker.device_type)
    rate = torch.tensor(1e-3, device=worker.device_type)
    model, optimizer = parallelize(
        Plan(**{"parameters": {"*": {}}, **fields}), model,
        lambda parameters: torch.optim.AdamW(parameters, lr=rate, capturable=True), mode=mode,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))

    def step(tokens: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(tokens)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    call = graphed(step, model, optimizer) if is_graphed else step
    tokens = torch.Generator().manual_seed(1)
    found, whys = [], []
    torch.manual_seed(2)
    for _ in range(STEPS):
        batch = torch.randint(WORDS, (ROWS, LENGTH), generator=tokens).to(worker.device_type)
        found.append([float(one) for one in call(batch)])
        whys.append(getattr(call, "why", ""))
        scheduler.step()
    state = [one.full_tensor() if isinstance(one, vescale.DTensor) else one for one in model.parameters()]
    generator = torch.get_device_module(worker.device_type).get_rng_state()
    return [found, [one.tolist() for one in state], generator.tolist()], whys


def compared(name: str) -> tuple[bool, list[str]]:
    (eager, _), (again, whys) = trained(name, False), trained(name, True)
    return eager == again, whys


def same(name: str, world: str) -> dict[str, Any]:
    answers = run_ranks(2 if "2" in name else 1, compared, name, timeout=SECONDS, device=world)
    whys = answers[0][1]
    return {
        "holds": all(alike and not why[-1] for alike, why in answers), "same": [alike for alike, _ in answers],
        "graph run": whys.count(""), "eager": sorted({*whys} - {""}),
    }  # fmt: skip


def ask(part: Part) -> None:
    world = "second" if part.device == "second" else "nccl"
    for name, (_, mode, _) in CASES.items():
        if part.device == "cuda" or mode == "eager":
            part.each(name, lambda name=name: same(name, world))


if __name__ == "__main__":
    run(ask)
