"""vescale_checkpoint: saving, loading and resharding over plain work on the same bytes (ratios, lower is better)."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.cases._schedule_cases import seconds

MIB, TENSORS = 64, 64


class Checkpoints:
    """64 MiB in 64 tensors, one process: `save` over `torch.save`, `load` over `torch.load`, both with fsync or cached;
    `reshard` into another set of tensors over `copy_`."""

    params = (["save", "load", "reshard"],)
    param_names = ("what",)

    def setup_cache(self):
        import torch
        import torch.distributed as dist

        from vescale_checkpoint import load, reshard, save

        rows = MIB * 2**20 // 4 // 1024 // TENSORS
        make = lambda value: {f"t{i}": torch.full((rows, 1024), value) for i in range(TENSORS)}
        ratios: dict[str, list[float]] = {name: [] for name in ("save", "load", "reshard")}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        folder = Path(tempfile.mkdtemp(prefix="vescale-checkpoints-"))
        try:
            state, other = make(1.0), make(0.0)
            for turn in range(5):
                file, run = folder / f"{turn}.pt", folder / f"run{turn}"
                pairs = {
                    "save": (partial(save, run, {"model": state}), partial(_saved, torch, state, file)),
                    "load": (partial(load, run, {"model": other}), partial(torch.load, file)),
                    "reshard": (partial(reshard, {"model": state}, {"model": other}), partial(_copied, state, other)),
                }
                for name, (ours, plain) in pairs.items():
                    ratio = seconds(ours, times=1) / seconds(plain, times=1)
                    if turn:  # the first warms up
                        ratios[name].append(ratio)
        finally:
            dist.destroy_process_group()
            shutil.rmtree(folder)
        return {name: median(values) for name, values in ratios.items()}

    setup_cache.timeout = 300

    def track_over_plain(self, cache, what):
        return cache[what]

    track_over_plain.unit = "x"
    track_over_plain.version = "1"


def _saved(torch, state, file) -> None:
    """As durable as a checkpoint."""
    with open(file, "wb") as written:
        torch.save(state, written)
        written.flush()
        os.fsync(written.fileno())


def _copied(state, other) -> None:
    for name, value in state.items():
        other[name].copy_(value)
