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

PACKAGES = (
    "vescale_dtensor", "vescale_rng", "vescale_plans", "vescale_pipeline", "vescale_checkpoint", "vescale"
)  # fmt: skip
PROGRAM = """
import json, time
began = time.process_time()
import torch, torch.distributed.tensor
middle = time.process_time()
import {package}
print(json.dumps([middle - began, time.process_time() - middle]))
"""


def share(package: str, times: int = 2) -> float | None:
    """CPU time of the package's own import over that of torch, in fresh processes; None: it cannot be imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", PROGRAM.format(package=package)]
    found = []
    for _ in range(times):
        said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        if said.returncode:
            return None
        theirs, ours = json.loads(said.stdout)
        found.append(ours / theirs)
    return median(found)


class Imports:
    params = (list(PACKAGES),)
    param_names = ("package",)

    def setup_cache(self):
        share("vescale", times=1)  # compiles what was not
        return {package: share(package) for package in PACKAGES}

    setup_cache.timeout = 600

    def setup(self, cache, package):
        if cache[package] is None:
            raise NotImplementedError

    def track_over_torch(self, cache, package):
        return cache[package]

    track_over_torch.unit = "x"
    track_over_torch.version = "2"
