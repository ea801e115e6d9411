"""Measured training steps: the slowest rank's wall time between two barriers, and what the machine did beside it.

The meshes of a case take turns, and a round of them is compared with itself: how fast a machine's neighbours let it be
drifts from round to round. Cases take turns, too, and each is visited several times, by processes of their own, since
where memory came to lie stays with a process. Rounds are lines of a file, each written as soon as it is whole, so that
a measurement can be cut anywhere and goes on from there. Rounds beside which others did anything do not count.
"""

from __future__ import annotations

import gc
import json
import math
import time
from pathlib import Path
from statistics import fmean, median

import torch

from planning.predicted_cases import MESHES, adamw, case_of, loss_of, plans_for
from vescale_testkit import run_ranks

WARM = 3
"""Steps before the first sample: the first calls compare the inputs of the ranks."""
QUIET = 0.15
"""Cores that others may have kept busy during a step that counts."""
GLANCE = 0.08
"""Seconds that the machine is watched before a step."""

Round = dict[str, tuple[float, float]]
"""mesh -> (seconds of the slowest rank, cores that others kept busy)."""


def rounds_in(path: Path) -> dict[str, list[Round]]:
    """The rounds of each case in a file; a last line that was cut is none."""
    found: dict[str, list[Round]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            case, one = json.loads(line)
        except ValueError:
            continue
        found.setdefault(case, []).append({mesh: tuple(sample) for mesh, sample in one.items()})
    return found


def undisturbed(rounds: list[Round]) -> int:
    return sum(disturbance(one) <= QUIET for one in rounds)


def disturbance(one: Round) -> float:
    return max(foreign for _, foreign in one.values())


def calm(rounds: list[Round]) -> list[Round]:
    """The undisturbed rounds; the three that were least disturbed where there are no three."""
    found = [one for one in rounds if disturbance(one) <= QUIET]
    return found if len(found) >= 3 else sorted(rounds, key=disturbance)[:3]


def settled(rounds: list[Round]) -> dict[str, float]:
    """mesh -> seconds: the median over rounds of its part of the round, times the median round."""
    rounds = calm(rounds)
    means = [math.exp(fmean(math.log(seconds) for seconds, _ in one.values())) for one in rounds]
    typical = median(means)
    return {mesh: typical * median(one[mesh][0] / mean for one, mean in zip(rounds, means)) for mesh in rounds[0]}


def spread(rounds: list[Round]) -> float:
    """How far a mesh's part of a round is from its median, in half of the cases: what one sample cannot tell apart."""
    typical, off = settled(rounds), []
    for one in calm(rounds):
        ratios = [seconds / typical[mesh] for mesh, (seconds, _) in one.items()]
        off += [abs(ratio / fmean(ratios) - 1) for ratio in ratios]
    return median(off)


def measure(cases: list[str], ranks: int, path: Path, clean: int, visits: int, limit: float) -> None:
    """Adds to `path` until each case has `clean` undisturbed rounds, by visits of `limit` seconds at most."""
    for visit in range(visits):
        for case in cases:
            missing = math.ceil(clean * (visit + 1) / visits) - undisturbed(rounds_in(path).get(case, []))
            if missing > 0:
                model, batch = case_of(case, ranks)
                texts = plans_for(model, batch, MESHES[ranks])
                run_ranks(ranks, steps, case, texts, missing, str(path), limit, timeout=limit + 150)
            found = rounds_in(path)[case]
            print(f"{case:<12} {undisturbed(found)} of {len(found)} undisturbed, {spread(found):.1%} apart", flush=True)


def steps(case: str, texts: dict[str, str], missing: int, path: str, limit: float) -> None:
    """Runs on every rank, meshes in turn, each step when the machine is calm, until no undisturbed round is missing or
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
    until = time.perf_counter() + limit
    while missing > 0 and not sum_over_ranks(time.perf_counter() > until):
        one: Round = {}
        for mesh, (model, optimizer) in built.items():
            rest(until)
            one[mesh] = timed(model, optimizer, batch)
        missing -= disturbance(one) <= QUIET
        if torch.distributed.get_rank() == 0:
            with open(path, "a") as lines:
                lines.write(json.dumps([case, one]) + "\n")
    gc.enable()


def train(model, optimizer, batch) -> None:
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(model, optimizer, batch) -> tuple[float, float]:
    from vescale._machine.devices import busy_seconds, own_seconds

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
    from vescale._machine.devices import busy_seconds

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
