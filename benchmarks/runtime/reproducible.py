"""What the reproducible mode costs: ratios of a training step in it over one outside, on one device.

    python benchmarks/runtime/reproducible.py [--rounds N] [--report-only]

The models of the examples, as these train them (8 sequences of 32 bytes), AdamW and clipping, with the default splits
and with half of them; one thread with and without, for the mode fixes it. Steps with and without are taken in turns in
one run; the median of the pairs' ratios is printed, closing with a line of JSON. The budget is that of the example
nanoGPT with the default splits.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

import vescale

sys.path.insert(0, str(Path(__file__).absolute().parents[2] / "examples"))
BUDGET, BATCH, POSITIONS = 4.0, 8, 32
SPLITS = {"8, 2, 8": (8, 2, 8), "4, 1, 4": (4, 1, 4)}


def built(family: str):
    """The model, and its loss of a batch."""
    module = importlib.import_module(f"{family}.model")
    if family == "nanogpt":
        return module.GPT(module.GPTConfig(block_size=POSITIONS)), lambda model, x, y: model(x, y)
    return module.build(), lambda model, x, y: model(input_ids=x, labels=x).loss


def ratio(family: str, splits: tuple[int, int, int], rounds: int) -> float:
    """The median over pairs of steps."""
    torch.manual_seed(0)
    model, loss_of = built(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    x, y = torch.randint(256, (2, BATCH, POSITIONS))
    mode = vescale.reproducible(dict(zip(("batch", "seq", "hidden"), splits)))

    def step() -> float:
        began = time.perf_counter()
        loss_of(model, x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    found = []
    for turn in range(rounds + 2):
        without = step()
        with mode:
            step() if turn < 2 else None
            found.append(step() / without)
    return median(found[2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for family in ("nanogpt", "llama", "mixtral"):
        for name, splits in SPLITS.items():
            figures[f"{family}, splits {name}"] = round(ratio(family, splits, options.rounds), 2)
    for name, value in figures.items():
        print(f"{name:<32}{value:.2f}")
    print(json.dumps(figures))
    return 0 if options.report_only or figures["nanogpt, splits 8, 2, 8"] <= BUDGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
