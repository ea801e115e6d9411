"""vescale_plans: the memory that a rank holds under each ZeRO stage (ratios, lower is better)."""

from __future__ import annotations

from benchmarks.cases._script import said


class Memory:
    """Live bytes per rank after a step and a backward, 2 gloo ranks, over what parameters, gradients and AdamW need."""

    params = (["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3"],)
    param_names = ("stage",)

    def setup_cache(self):
        return said("runtime/zero.py", "memory", "--small")["memory"]

    setup_cache.timeout = 420

    def track_over_formula(self, cache, stage):
        return cache[stage]["ratio"]

    track_over_formula.unit = "x"
    track_over_formula.version = "1"
