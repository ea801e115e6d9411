"""What recording a run costs while it is on: ratios of a training step with `vescale.record` over one without.

    python benchmarks/recording.py [--rounds N]

The example GPT on one device and on 2 gloo ranks (tensor parallel), AdamW; steps with and
without are taken in turns in one run, and the median of the pairs' ratios is printed,
closing with a line of JSON. There is no budget: a recording is a tool for debugging, and
off it installs nothing.
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

from vescale_testkit import run_ranks, warm_up

sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "examples"))

POSITIONS, BATCH = 128, 8


def ratios(folder: Path, ranks: int, rounds: int) -> list[float]:
    """Of each round. Runs on every rank."""
    from nanogpt.model import GPT, GPTConfig

    import vescale
    from vescale_plans import library

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    if ranks == 1:
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        plan = library.gpt(mesh={"tp": ranks}, sequence_parallel=True)
        model, optimizer = vescale.parallelize(plan, model, torch.optim.AdamW)
    inputs, targets = torch.randint(256, (2, BATCH, POSITIONS))

    def step() -> float:
        began = time.perf_counter()
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    for _ in range(3):
        step()
    found = []
    for turn in range(rounds):
        without = step()
        with vescale.record(model, folder / f"{ranks}-{turn}", optimizer=optimizer):
            found.append(step() / without)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    warm_up("torch._dynamo", "vescale")
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            figures[f"recorded over plain, {ranks} rank{'s' * (ranks > 1)}"] = round(
                median(run_ranks(ranks, ratios, Path(folder), ranks, rounds, timeout=200)[0]), 2
            )
    for name, ratio in figures.items():
        print(f"{name:<32}{ratio:.2f}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
