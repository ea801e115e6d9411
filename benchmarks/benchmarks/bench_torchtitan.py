"""Against TorchTitan, where its environment is (benchmarks/torchtitan/README.md): host time of a step, fake group.

Without it these have no point: nothing is simulated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).absolute().parents[1] / "torchtitan/side_by_side.py"
CASES = {
    "TP 8": "TorchTitan spmd_types, no FSDP2",
    "ZeRO-3 2 x TP 8": "TorchTitan spmd_types",
}


class TorchTitan:
    """CPU time of a step over that of its `spmd_types` backend."""

    params = (list(CASES), ["static", "eager"])
    param_names = ("layout", "mode")

    def setup_cache(self):
        said = subprocess.run(
            [sys.executable, str(SCRIPT), "host", "--rounds", "12", "--brief"],
            env=os.environ, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        try:
            figures = json.loads(said.stdout.splitlines()[-1])["figures"]
        except (IndexError, ValueError):
            return {}
        return {figure["layout"]: figure["cpu over"] for figure in figures}

    setup_cache.timeout = 600

    def setup(self, cache, layout, mode):
        if CASES[layout] not in cache.get(layout, {}):
            raise NotImplementedError  # TorchTitan is not here, or this commit cannot run it

    def track_slowdown_vs_torchtitan(self, cache, layout, mode):
        return cache[layout][CASES[layout]][f"veScale {mode}"]

    track_slowdown_vs_torchtitan.unit = "x"
    track_slowdown_vs_torchtitan.version = "1"
