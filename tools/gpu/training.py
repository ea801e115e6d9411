"""(b) The CI cases on the device, against one device without veScale."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from training_cases import CASES, Case, batches, build, loss_of, optimizer_of, train
from vescale_dtensor.testing import run_ranks

from .part import Part, run

LOSS, PARAMETER = 1e-4, 1e-3  # sums are cut otherwise, and kernels chosen by sizes
LOW = 2e-2  # where numbers travel or compute in fewer bits


def ranks_of(case: Case, device: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run on each rank."""
    found = train(case, device)
    return found.losses, found.parameters


def alone(case: Case, device: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The case's loop on one device; under a pipeline with its microbatches, accumulated."""
    model = build(case).to(device)
    optimizer = optimizer_of(case)(model.parameters())
    torch.manual_seed(1)
    losses = []
    for tokens in batches():
        total = 0.0
        for rows in tokens.to(device).chunk(case.microbatches):
            loss = loss_of(case, model, rows) / case.microbatches
            loss.backward()
            total += loss.item()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def held(case: Case, part: Part, world: str) -> dict[str, Any]:
    if "pipeline" in case.fields and world == "cpu":
        return {"not run": "gloo sends no CUDA tensors; NCCL needs a GPU for each rank"}
    if case.dropout and part.device == "cuda" and case.model != "gpt":
        return {"not run": "attention's dropout on CUDA is no fused kernel's: nothing to compare with"}
    tell = run_ranks(case.world, ranks_of, case, part.device, timeout=90, device=world)
    wanted = alone(case, reference_device(part.device))
    loss = max(abs(a - b) / abs(b) for losses, _ in tell for a, b in zip(losses, wanted[0]))
    worst = 0.0
    for _, parameters in tell:
        for name, value in parameters.items():
            own = wanted[1].get(name)
            if own is not None and own.shape == value.shape:
                worst = max(worst, float((value - own).norm() / own.norm().clamp(min=1e-12)))
    bounds = (LOW, None) if case.like_ranks else (LOSS, PARAMETER)
    holds = loss <= bounds[0] and (bounds[1] is None or worst <= bounds[1])
    return {"holds": holds, "loss": loss, "parameters": worst, "ranks": case.world, "collectives": world}


def on_nccl(case: Case, folder: str, rank: int) -> None:
    """One process of a world in which every rank has a GPU; rank 0 writes what it found."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", case.world)
    backend = "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=case.world, timeout=limit)
    found = train(case, "cuda")
    if rank == 0:
        torch.save((found.losses, found.parameters), f"{folder}/found")
    dist.destroy_process_group()


def held_on_nccl(case: Case) -> dict[str, Any]:
    multiprocessing = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [multiprocessing.Process(target=on_nccl, args=(case, folder, rank)) for rank in range(case.world)]
        for process in processes:
            process.start()
        until = time.monotonic() + 90
        for process in processes:
            process.join(max(0.1, until - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        if late or any(process.exitcode for process in processes):
            return {"holds": False, "failed": f"ranks {late} hang; exits {[p.exitcode for p in processes]}"}
        losses, _ = torch.load(f"{folder}/found")
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, alone(case, "cuda")[0]))
    return {"holds": loss <= (LOW if case.like_ranks else LOSS), "loss": loss, "collectives": "nccl"}


def world_of_one(case: Case, device: str) -> dict[str, Any]:
    """The case on one rank, which joins by itself: streams and collectives of the device's own backend."""
    single = replace(case, mesh=dict.fromkeys(case.mesh, 1))
    losses = train(single, device).losses
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, alone(case, reference_device(device))[0]))
    return {"holds": loss <= LOSS, "loss": loss}


def reference_device(device: str) -> str:
    """The second device makes the CPU's numbers; models may take a way on it that CPU kernels do not have."""
    return "cpu" if device == "second" else device


def ask(part: Part) -> None:
    for name in ("llama-zero0-clip", "llama-zero3-clip", "llama-tp-sp", "llama-static-zero2", "mixtral-experts"):
        part.each(f"{name} in a world of one", lambda name=name: world_of_one(CASES[name], part.device))
    world = "second" if part.device == "second" else "cpu"  # gloo: ranks share one GPU
    for case in CASES.values():
        if part.device == "cuda" and part.devices >= case.world:
            part.each(f"{case.name} on nccl", lambda case=case: held_on_nccl(case))
        part.each(case.name, lambda case=case: held(case, part, world))


if __name__ == "__main__":
    run(ask)
