"""(c) A training step of one rank in a world without processes: where the host waits for the device."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import vescale
from sweeps.training_cases import CASES, Case, batches, build, loss_of, optimizer_of, plan_of

from .part import Part, run

NAMES = [f"llama-zero{zero}-clip" for zero in range(4)] + [
    "gpt-dropout-zero0", "llama-tp", "llama-tp-sp", "llama-dp-tp-sp-zero3", "llama-recompute", "llama-regather",
]  # fmt: skip
OURS = ("dtensor/", "rng/", "plans/", "pipeline/", "checkpoint/", "vescale/")
STEPS = 5  # inputs are compared between ranks in the first three


def waits(case: Case, device: str) -> dict[str, Any]:
    """Those of a rank whose numbers mean nothing: what the other ranks would send stays as it lies."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world)
    try:
        return waits_here(case, device)
    finally:
        from vescale_plans._apply.join import forget_meshes

        forget_meshes()
        dist.destroy_process_group()


def waits_here(case: Case, device: str) -> dict[str, Any]:
    """Those of the last step, on this rank of a world that was joined."""
    model, make = build(case).to(device), optimizer_of(case)
    model, optimizer = vescale.parallelize(plan_of(case), model, make)
    tokens = batches()[0].to(device)
    for step in range(STEPS):
        with counted(device) if step == STEPS - 1 else contextlib.nullcontext(Counter()) as sites:
            loss_of(case, model, tokens).backward()
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    ours = {site: count for site, count in sites.items() if any(one in site for one in OURS)}
    return {"holds": not ours, "ours": ours, "the model's own": {s: n for s, n in sites.items() if s not in ours}}


@contextlib.contextmanager
def counted(device: str) -> Iterator[Counter[str]]:
    """By line of code. `torch.cuda.set_sync_debug_mode` sees what the CUDA runtime would wait for."""
    sites: Counter[str] = Counter()
    if device == "second":
        from vescale_testkit.second import host_waits

        with host_waits() as found:
            yield sites
        sites.update(found.sites)
        return

    def heard(message: Any, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            own = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and "/gpu/" not in f.filename]
            file = own[-1].filename if own else "?"
            file = file.rpartition("/src/")[2] if "/packages/" in file else file.rpartition("/")[2]
            sites[f"{file}:{own[-1].lineno if own else 0}"] += 1

    before, warnings.showwarning = warnings.showwarning, heard
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = heard
            torch.cuda.set_sync_debug_mode("warn")
            yield sites
    finally:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = before


def ask(part: Part) -> None:
    for name in NAMES:
        case = CASES[name]
        part.each(name, lambda case=case: waits(case, part.device))


if __name__ == "__main__":
    run(ask)
