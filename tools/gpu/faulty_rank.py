"""A rank of a training, of which rank 1 does something else in the fourth step: a program for (j)."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import vescale

HANG_S, TIMEOUT_S, STEPS, WHEN = 6, 30, 6, 3
WIDTH = 64


def dies(_: nn.Module) -> None:
    os._exit(3)


def stops(_: nn.Module) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def computes_for_itself(model: nn.Module) -> None:
    """A collective that no other rank comes to."""
    next(model.parameters()).detach().full_tensor()


FAULTS: dict[str, Callable[[nn.Module], None]] = {
    "dies": dies, "stops": stops, "runs another collective": computes_for_itself,
}  # fmt: skip


def join(device: str, rank: int) -> None:
    if device == "second":
        from vescale_testkit import second

        second.register()
    else:
        from vescale_testkit import one_gpu

        one_gpu.prepare(rank, 2)
    backend = "second" if device == "second" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))


def main(device: str, fault: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    join(device, rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(device)
    plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3)
    model, optimizer = vescale.parallelize(plan, model, torch.optim.SGD)
    for step in range(STEPS):
        loss = model(torch.ones(4, WIDTH, device=device)).square().mean()
        if step == WHEN and rank == 1:
            (folder / "fault").write_text(json.dumps(time.time()))
            FAULTS[fault](model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]))
