"""(e) The peak of a step's memory as the allocator has it, against a dry run's."""

from __future__ import annotations

import contextlib
import gc
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import vescale
from vescale_plans._dry.meter import Meter

from .part import Part, run

WIDTH, BLOCKS, TOKENS = 1024, 8, 4096
WITHIN = 0.1  # an allocator rounds, and kernels have scratch


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(BLOCKS))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs):
            x = x + down(F.gelu(up(x)))
        return x.square().mean()


class OfDevice(Meter):
    """Counts what does not lie on the host."""

    def _note(self, tensor: torch.Tensor, kind: str, relabel: bool = False) -> None:
        super()._note(tensor, "host" if tensor.device.type == "cpu" else kind, relabel)


make = partial(torch.optim.AdamW, lr=1e-3)


def sizes(device: str) -> tuple[int, int]:
    return (WIDTH, TOKENS) if device == "cuda" else (64, 128)


def plan_of(fields: dict[str, Any]) -> vescale.Plan:
    return vescale.Plan(mesh={"dp": 1}, parameters={"*": {}}, **fields)


def predicted_peak(fields: dict[str, Any], device: str) -> int:
    width, tokens = sizes(device)
    return vescale.dry_run(plan_of(fields), Net(width), (torch.zeros(tokens, width),), make).peak


def peak(fields: dict[str, Any], predicted: int, device: str) -> dict[str, Any]:
    width, tokens = sizes(device)
    gc.collect()  # of the question before: what it leaves would be given back amid this one
    if device == "cuda":
        torch.cuda.empty_cache()
    inputs = torch.randn(tokens, width, device=device)  # a dry run does not count what the batch takes
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    model, optimizer = vescale.parallelize(plan_of(fields), Net(width), make)
    # The second device keeps no statistics: there a meter counts storages.
    meter = OfDevice()
    meter.label([*model.parameters(), *model.buffers()], "parameters")
    with contextlib.nullcontext() if device == "cuda" else meter:
        for step in range(3):
            if step == 2:
                torch.cuda.reset_peak_memory_stats() if device == "cuda" else meter.mark()
            model(inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    measured = torch.cuda.max_memory_allocated() - before if device == "cuda" else meter.peak.total()
    off = measured / predicted - 1
    return {"holds": abs(off) <= WITHIN, "predicted": predicted, "measured": measured, "off": round(off, 4)}


def ask(part: Part) -> None:
    bf16 = vescale.Precision(torch.bfloat16)
    plans = {
        "zero 0": {}, "zero 3": {"zero": 3},
        "bf16": {"precision": bf16}, "bf16, zero 3": {"precision": bf16, "zero": 3},
        "offload": {"offload": True}, "offload, bf16": {"offload": True, "precision": bf16},
    }  # fmt: skip
    # A dry run has a world of its own: all of them before the world is joined.
    predicted = {name: predicted_peak(fields, part.device) for name, fields in plans.items()}
    for name, fields in plans.items():
        part.each(name, lambda name=name, fields=fields: peak(fields, predicted[name], part.device))


if __name__ == "__main__":
    run(ask)
