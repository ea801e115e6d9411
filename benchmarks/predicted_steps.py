"""Measured training steps: the slowest rank's wall time between two barriers, and what the machine did beside it.

Samples are lines of a file, each written as soon as it is taken, so that a measurement can be cut anywhere and goes on
from there. Steps beside which others did anything do not count.
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from statistics import median

import torch

from predicted_cases import MESHES, adamw, case_of, loss_of, plans_for
from vescale_dtensor.testing import run_ranks

WARM = 3
"""Steps before the first sample: the first calls compare the inputs of the ranks."""
QUIET = 0.15
"""Cores that others may have kept busy during a step that counts."""
GLANCE = 0.08
"""Seconds that the machine is watched before a step."""

Samples = dict[tuple[str, str], list[tuple[float, float]]]
"""(case, mesh) -> (seconds of the slowest rank, cores that others kept busy) of each step."""


def samples_in(path: Path) -> Samples:
    """What a file holds; a last line that was cut is none."""
    found: Samples = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            case, mesh, seconds, foreign = json.loads(line)
        except ValueError:
            continue
        found.setdefault((case, mesh), []).append((seconds, foreign))
    return found


def undisturbed(samples: list[tuple[float, float]]) -> int:
    return sum(foreign <= QUIET for _, foreign in samples)


def calm(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The undisturbed samples; the three that were least disturbed where there are no three."""
    found = [one for one in samples if one[1] <= QUIET]
    return found if len(found) >= 3 else sorted(samples, key=lambda one: one[1])[:3]


def settled(samples: list[tuple[float, float]]) -> float:
    return median(seconds for seconds, _ in calm(samples))


def measure(case: str, ranks: int, path: Path, clean: int, limit: float) -> Samples:
    """Adds to `path` until each mesh of a case has `clean` undisturbed steps, for `limit` seconds at most."""
    known = samples_in(path)
    missing = {mesh: clean - undisturbed(known.get((case, mesh), [])) for mesh in MESHES[ranks]}
    missing = {mesh: count for mesh, count in missing.items() if count > 0}
    if missing:
        model, batch = case_of(case, ranks)
        texts = plans_for(model, batch, {mesh: MESHES[ranks][mesh] for mesh in missing})
        run_ranks(ranks, steps, case, texts, missing, str(path), limit, timeout=limit + 150)
    return {key: found for key, found in samples_in(path).items() if key[0] == case}


def steps(case: str, texts: dict[str, str], missing: dict[str, int], path: str, limit: float) -> None:
    """Runs on every rank, meshes in turn, each step when the machine is calm, until none misses an undisturbed step or
    `limit` seconds are over."""
    import vescale

    torch.set_num_threads(1)
    built = {}
    for mesh, text in texts.items():
        model, batch = case_of(case, torch.distributed.get_world_size())
        built[mesh] = vescale.parallelize(vescale.Plan.from_json(text), model, adamw)
    for _ in range(WARM):
        for model, optimizer in built.values():
            train(model, optimizer, batch)
    gc.collect()
    gc.disable()
    until, missing = time.perf_counter() + limit, dict(missing)
    while any(count > 0 for count in missing.values()):
        for mesh, (model, optimizer) in built.items():
            if missing[mesh] <= 0:
                continue
            rest(until)
            seconds, foreign = timed(model, optimizer, batch)
            missing[mesh] -= foreign <= QUIET
            if torch.distributed.get_rank() == 0:
                with open(path, "a") as lines:
                    lines.write(json.dumps([case, mesh, seconds, foreign]) + "\n")
        if sum_over_ranks(time.perf_counter() > until):
            break
    gc.enable()


def train(model, optimizer, batch) -> None:
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(model, optimizer, batch) -> tuple[float, float]:
    from vescale._devices import busy_seconds, own_seconds

    torch.distributed.barrier()
    own, busy = own_seconds(), busy_seconds()
    began = time.perf_counter()
    train(model, optimizer, batch)
    torch.distributed.barrier()
    seconds, busy = time.perf_counter() - began, busy_seconds() - busy
    everyone = [torch.empty(2) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, torch.tensor([seconds, own_seconds() - own]))
    seconds, own = torch.stack(everyone).double().unbind(1)
    foreign = max(0.0, busy - own.sum().item()) / seconds.max().item()
    return round(seconds.max().item(), 5), round(foreign, 3)


def rest(until: float) -> None:
    """Until others leave the machine alone, or `until`."""
    from vescale._devices import busy_seconds

    while True:
        busy = busy_seconds()
        time.sleep(GLANCE)
        calm = busy_seconds() - busy <= QUIET * GLANCE or time.perf_counter() > until
        if sum_over_ranks(calm):
            return


def sum_over_ranks(truth: bool) -> float:
    """How many ranks say so."""
    total = torch.tensor(float(truth))
    torch.distributed.all_reduce(total)
    return total.item()
