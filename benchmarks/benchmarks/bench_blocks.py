"""vescale_plans: what a plan costs over hand-written local code (ratios, lower is better)."""

from __future__ import annotations

from benchmarks.cases._script import said


class PlanBlocks:
    """Four Llama blocks under TP+SP on 8 fake ranks, both ways: pure overhead."""

    params = (["veScale, a plan", "torch DTensor"],)
    param_names = ("contender",)

    # Its own, not inherited: ASV runs one that two classes share once, for both.
    def setup_cache(self):
        return said("runtime/plan_blocks.py", "--rounds", "100")

    setup_cache.timeout = 420

    def track_over_by_hand(self, cache, contender):
        return cache[contender]["ratio"]

    track_over_by_hand.unit = "x"
    track_over_by_hand.version = "1"


class LlamaStep:
    """The example Llama's whole training step under TP+SP on 2 gloo ranks, CPU time of both."""

    params = (["veScale"],)
    param_names = ("contender",)

    def setup_cache(self):
        return said("runtime/llama_step.py", "--rounds", "40")

    setup_cache.timeout = 420

    def track_over_by_hand(self, cache, contender):
        return cache[contender]["ratio"]

    track_over_by_hand.unit = "x"
    track_over_by_hand.version = "1"
