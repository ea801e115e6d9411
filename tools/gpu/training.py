"""(b) The CI cases on the device, against one device without veScale: to the bit where nothing is reordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sweeps.training_cases import CASES, Case, Outcome, single, train
from sweeps.training_verdict import Bounds, bounds_of, wanted_of, wrong_numbers
from vescale_testkit import run_ranks

from .part import Part, run

LOW = Bounds(2e-2, float("inf"))  # where numbers travel or compute in fewer bits, against one GPU's in float32
SECONDS = 90  # of a case
STAGED = ("llama-1f1b-clip", "gpt-dropout-1f1b", "gpt-tied-zbv-clip")


def verdict(case: Case, device: str, outcomes: Sequence[Outcome], collectives: str) -> dict[str, Any]:
    """What the ranks have, against what one device makes of the case.

    On the second device that is the CPU; where that cannot be said, the same plan on gloo.
    """
    if device == "second":
        wanted, bounds = wanted_of(case), bounds_of(case)
    else:
        wanted, bounds = single(case, device), LOW if case.like_ranks else bounds_of(case)
    wrong = wrong_numbers(outcomes, wanted, bounds)
    off = max(abs(a - b) / abs(b) for one in outcomes for a, b in zip(one.losses, wanted.losses))
    found = {"holds": not wrong, "loss": off, "within": bounds.loss, "ranks": case.world, "collectives": collectives}
    return found | ({"wrong": wrong[:3]} if wrong else {})


def held(case: Case, part: Part, world: str) -> dict[str, Any]:
    if case.dropout and part.device == "cuda" and case.model != "gpt":
        return {"not run": "attention's dropout on CUDA is no fused kernel's: nothing to compare with"}
    outcomes = run_ranks(case.world, train, case, part.device, timeout=SECONDS, device=world)
    staged = ", transfers between stages through the host" if "pipeline" in case.fields else ""
    return verdict(case, part.device, outcomes, f"gloo{staged}" if world == "cpu" else world)


def through_host(case: Case, device: str) -> Outcome:
    """The case on this rank, with transfers between stages as gloo's ranks have them that share one GPU."""
    from vescale_pipeline._transport import p2p, staged

    def wire_of(group: Any, device: torch.device, timeout: timedelta) -> Any:
        ranks = dist.get_process_group_ranks(group)
        return staged.Staged(dist.new_group(ranks, backend="gloo")._get_backend(torch.device("cpu")), timeout)

    original, p2p.wire_of = p2p.wire_of, wire_of
    try:
        return train(case, device)
    finally:
        p2p.wire_of = original


def rehearsed_through_host(case: Case) -> dict[str, Any]:
    outcomes = run_ranks(case.world, through_host, case, "second", timeout=SECONDS, device="second")
    return verdict(case, "second", outcomes, "second, transfers between stages through the host")


def world_of_one(case: Case, device: str) -> dict[str, Any]:
    """The case on one rank, which joins by itself: streams and collectives of the device's own backend."""
    alone = replace(case, mesh=dict.fromkeys(case.mesh, 1))
    return verdict(alone, device, [train(alone, device)], "a world of one")


def ask(part: Part) -> None:
    for name in ("llama-zero0-clip", "llama-zero3-clip", "llama-tp-sp", "mixtral-experts"):
        part.each(f"{name} in a world of one", lambda name=name: world_of_one(CASES[name], part.device))
    world = "second" if part.device == "second" else "cpu"  # gloo: ranks share one GPU
    for case in CASES.values():
        part.each(case.name, lambda case=case: held(case, part, world))
    for name in STAGED if part.device == "second" else ():
        part.each(f"{name} through the host", lambda name=name: rehearsed_through_host(CASES[name]))


if __name__ == "__main__":
    run(ask)
