"""(g) What the reproducible mode takes for granted of the device's kernels, and what the mode costs there."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import vescale
from sweeps.training_cases import CASES, batches, build, loss_of

from .part import Part, run


def premise(device: str, deterministic: bool) -> dict[str, Any]:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        found = vescale.check_premise(device)
    finally:
        torch.use_deterministic_algorithms(False)
    return {"holds": not found, "found": found}


def cost(device: str) -> dict[str, Any]:
    """Seconds of a step in the mode and out of it."""
    took = {}
    for name, mode in (("out", nullcontext), ("in", partial(vescale.reproducible, splits={"batch": 4, "hidden": 4}))):
        case = CASES["llama-zero0-clip"]
        model = build(case).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        times = []
        with mode():
            for _ in range(8):
                began = time.perf_counter()
                loss_of(case, model, batches()[0].to(device)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
        took[name] = statistics.median(times[3:])
    return {"ratio": round(took["in"] / took["out"], 2), **{name: round(s, 5) for name, s in took.items()}}


def ask(part: Part) -> None:
    part.each("premise", lambda: premise(part.device, False))
    part.each("premise, deterministic algorithms", lambda: premise(part.device, True))
    part.each("cost", lambda: cost(part.device))


if __name__ == "__main__":
    run(ask)
