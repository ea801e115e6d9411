"""Against TorchTitan, where its environment is (benchmarks/torchtitan/README.md): host time of a step on a fake group,
and tokens per second of two ranks on gloo.

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


GLOO = ["FSDP 2", "TP 2", "PP 2"]
SIDES = ["veScale", "TorchTitan spmd_types"]


def figures_of(*words: str) -> list[dict]:
    """What the side-by-side program says of every layout; nothing where it cannot run."""
    command = [sys.executable, str(SCRIPT), *words, "--brief"]
    said = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=500)
    try:
        return json.loads(said.stdout.splitlines()[-1])["figures"]
    except (IndexError, ValueError):
        return []


class TorchTitan:
    """CPU time of a step over that of its `spmd_types` backend."""

    params = (list(CASES),)
    param_names = ("layout",)

    def setup_cache(self):
        return {figure["layout"]: figure["cpu over"] for figure in figures_of("host", "--rounds", "12")}

    setup_cache.timeout = 600

    def setup(self, cache, layout):
        if CASES[layout] not in cache.get(layout, {}):
            raise NotImplementedError  # TorchTitan is not here, or this commit cannot run it

    def track_slowdown_vs_torchtitan(self, cache, layout):
        return cache[layout][CASES[layout]]["veScale"]

    track_slowdown_vs_torchtitan.unit = "x"
    track_slowdown_vs_torchtitan.version = "2"


class Throughput:
    """Tokens per second of both, by wall time, taking turns; 4 samples of 64 tokens a step."""

    params = (GLOO, SIDES)
    param_names = ("layout", "side")

    def setup_cache(self):
        return {each["layout"]: each["tokens per second"] for each in figures_of("gloo", "--rounds", "10")}

    setup_cache.timeout = 600

    def setup(self, cache, layout, side):
        if side not in cache.get(layout, {}) or "TorchTitan spmd_types" not in cache[layout]:
            raise NotImplementedError  # TorchTitan is not here, or this commit cannot run it

    def track_tokens_per_second(self, cache, layout, side):
        return cache[layout][side]

    track_tokens_per_second.unit = "tokens/s"
    track_tokens_per_second.version = "1"
