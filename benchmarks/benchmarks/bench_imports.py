"""Every package: what importing it adds to torch's own import (ratios of CPU time, lower is better).

Torch's is that of `torch` with `torch.distributed.tensor`, whose placements are ours as well: by itself half as long as
`import torch`, and needed by whoever shards with torch. Bytecode is cached on both sides, as after a first run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median

# In this order, each adds what those before it do not hold; the last is what all of them take together.
PACKAGES = (
    "vescale_dtensor", "vescale_rng", "vescale_plans", "vescale_pipeline", "vescale_checkpoint", "vescale"
)  # fmt: skip
PROGRAM = """
import importlib, json, sys, time
took = []
for names in (("torch", "torch.distributed.tensor"), *((name,) for name in sys.argv[1:])):
    began = time.process_time()
    for name in names:
        importlib.import_module(name)
    took.append(time.process_time() - began)
print(json.dumps(took))
"""


def shares(times: int = 4) -> dict[str, float]:
    """CPU time of each package's own import, and of all together, over that of torch, in fresh processes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found: dict[str, list[float]] = {package: [] for package in PACKAGES}
    for turn in range(times + 1):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *PACKAGES], env=environment, capture_output=True, text=True, timeout=240
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        torch, *ours = json.loads(done.stdout)
        if turn:  # the first one may compile
            for package, took in zip(PACKAGES, (*ours[:-1], sum(ours)), strict=True):
                found[package].append(took / torch)
    return {package: median(took) for package, took in found.items()}


class Imports:
    params = (list(PACKAGES),)
    param_names = ("package",)

    def setup_cache(self):
        return shares()

    setup_cache.timeout = 600

    def track_over_torch(self, cache, package):
        return cache[package]

    track_over_torch.unit = "x"
    track_over_torch.version = "2"
