"""What it costs to keep steps in memory, and to change the plan: ratios, on gloo ranks of this machine.

    python benchmarks/elastic.py [--rounds N]

`vescale.protect` at every = 10: the CPU time in which all ranks keep a step (written, copied as far as there is another
node, committed), over that of the ten steps before it. `vescale.reshape`: its time over that of a job
that saves under the old plan, and makes model and optimizer anew and loads under the new one, in the same processes,
whose restart is not counted; and the bytes that came over those that ranks need and do not hold. The example GPT, of
10.6 M parameters for `reshape`, AdamW. Closes with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from vescale_testkit import run_ranks, warm_up

sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "examples"))

POSITIONS, BATCH, EVERY = 128, 8, 10
LARGER = {"n_layer": 6, "n_embd": 384}
CHANGES = {
    "dp 4 -> dp 2 x tp 2": (({"dp": 4}, {}), ({"dp": 2, "tp": 2}, {})),
    "dp 2 x tp 2 -> dp 4, ZeRO-3": (({"dp": 2, "tp": 2}, {}), ({"dp": 4}, {"zero": 3})),
    "dp 4, ZeRO-3 -> tp 4": (({"dp": 4}, {"zero": 3}), ({"tp": 4}, {})),
    "tp 4 -> pp 2 x tp 2": (({"tp": 4}, {}), ({"pp": 2, "tp": 2}, {})),
    "pp 2 x tp 2 -> 2 ranks, ZeRO-3": (({"pp": 2, "tp": 2}, {}), ({"dp": 2}, {"zero": 3})),
}


def plan_of(mesh: dict, changes: dict):
    import vescale
    from vescale_plans import library

    plan = library.gpt(mesh=mesh, sequence_parallel="tp" in mesh)
    if "pp" in mesh:
        pipeline = vescale.Pipeline(cuts=("transformer.h.2",), microbatches=2)
        plan = plan.override(pipeline=pipeline, data_axis=None)
    return plan.override(**changes)


def made(mesh: dict, changes: dict, **sizes: int):
    from nanogpt.model import GPT, GPTConfig

    import vescale

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return vescale.parallelize(plan_of(mesh, changes), GPT(GPTConfig(**sizes)), torch.optim.AdamW)


def step_of(model, optimizer):
    inputs, targets = torch.randint(256, (2, BATCH, POSITIONS))

    def step() -> None:
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def protected(folder: Path, rounds: int) -> list[list[float]]:
    """CPU seconds of each round: of its ten steps, and of keeping the last. Runs on every rank."""
    import vescale

    model, optimizer = made({"dp": dist.get_world_size()}, {})
    step, found = step_of(model, optimizer), []
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with vescale.protect(folder, state, every=EVERY) as kept:
        for _ in range(rounds + 1):
            dist.barrier()
            began = time.process_time()
            for _ in range(EVERY):
                step()
            state["step"] += EVERY
            done = time.process_time()
            kept.step().wait()
            found.append([done - began, time.process_time() - done])
    return found[1:]


def reshaped(folder: Path, old: tuple, new: tuple, rounds: int) -> list[list[float]]:
    """Seconds of each round: by a checkpoint, by reshape. Runs on every rank."""
    import vescale

    model, optimizer = made(*old, **LARGER)
    step_of(model, optimizer)()
    found = []
    for turn in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        vescale.reshape(model, optimizer, plan_of(*new))
        dist.barrier()
        moved = time.perf_counter() - began
        vescale.reshape(model, optimizer, plan_of(*old))
        dist.barrier()
        began = time.perf_counter()
        vescale.save(folder, {"model": model, "optimizer": optimizer}, step=turn)
        other, others = made(*new, **LARGER)
        vescale.load(folder, {"model": other, "optimizer": others}, step=turn)
        dist.barrier()
        found.append([time.perf_counter() - began, moved])
    return found


def received(old: tuple, new: tuple) -> list[int]:
    """The bytes of parameters that came, and those that this rank needs and did not hold. Runs on every rank."""
    import vescale

    model, _ = made(*old)
    with torch.no_grad():
        for one in model.parameters():
            if isinstance(one, vescale.DTensor):
                numbers = torch.arange(one.numel(), dtype=torch.float32).view(one.shape)
                whole = [vescale.Replicate()] * one.device_mesh.ndim
                one.copy_(vescale.distribute_tensor(numbers, one.device_mesh, whole))
    held = {name: one.to_local().flatten().clone() for name, one in model.named_parameters()}
    came, needed = vescale.reshape(model, None, plan_of(*new)), 0
    for name, one in model.named_parameters():
        local = one.to_local().flatten()
        needed += 4 * int((~torch.isin(local, held.get(name, local[:0]))).sum())
    return [came, needed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    warm_up("torch._dynamo", "vescale")
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        pairs = zip(*run_ranks(2, protected, Path(folder) / "protected", rounds, timeout=600))
        ratios = [sum(keeps for _, keeps in turn) / sum(steps for steps, _ in turn) for turn in pairs]
        figures[f"protect, every {EVERY}: CPU over that of the steps"] = round(median(ratios), 3)
        for place, (name, (old, new)) in enumerate(CHANGES.items()):
            if plan_of(*new).world_size == 4:  # a job begins on all of its ranks
                times = run_ranks(4, reshaped, Path(folder) / str(place), old, new, rounds, timeout=600)[0]
                ratio = median(moved / other for other, moved in times)
                figures[f"{name}: time over a checkpoint's"] = round(ratio, 2)
            bytes_ = run_ranks(4, received, old, new, timeout=300)
            came, needed = (sum(one[side] for one in bytes_) for side in (0, 1))
            figures[f"{name}: bytes over the least"] = round(came / needed, 3) if needed else came
    for name, ratio in figures.items():
        print(f"{name:<60}{ratio:>8}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
