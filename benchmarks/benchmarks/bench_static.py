"""vescale_plans: what static mode costs over hand-written local code (ratios, lower is better)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).absolute().parents[1]


class _Ratios:
    """A script runs the race, once, in `setup_cache`. (Its exit status tells of budgets, which the gate reads.)"""

    script = ""

    def setup_cache(self):
        done = subprocess.run([sys.executable, str(SCRIPTS / self.script)], capture_output=True, text=True, timeout=400)
        lines = done.stdout.splitlines()
        if not lines:
            raise RuntimeError(done.stderr[-2000:])
        return {name: figures["ratio"] for name, figures in json.loads(lines[-1]).items()}

    setup_cache.timeout = 420

    def track_over_by_hand(self, cache, contender):
        return cache[contender]

    track_over_by_hand.unit = "x"
    track_over_by_hand.version = "1"


class StaticBlocks(_Ratios):
    """Four Llama blocks under TP+SP on 8 fake ranks, both ways: pure overhead."""

    script = "static_blocks.py"
    params = (["veScale, static", "veScale, a plan, eager", "torch DTensor"],)
    param_names = ("contender",)


class LlamaStep(_Ratios):
    """The example Llama's whole training step under TP+SP on 2 gloo ranks, CPU time of both."""

    script = "llama_step.py"
    params = (["veScale, static", "veScale, eager"],)
    param_names = ("contender",)
