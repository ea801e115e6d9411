"""vescale_pipeline: what proving and timing a large schedule costs, over generating it (ratios, lower is better)."""

from __future__ import annotations

from functools import partial

from benchmarks.cases._schedule_cases import KINDS, LARGE, seconds


class LargeSchedules:
    """64 ranks, 512 microbatches, 4 stages per rank."""

    params = (list(KINDS), ["verify", "simulate"])
    param_names = ("kind", "what")

    def setup_cache(self):
        from vescale_pipeline import generate, simulate, verify

        ratios = {}
        for kind in KINDS:
            generating = seconds(partial(generate, kind, *LARGE), times=3)
            schedule = generate(kind, *LARGE)
            for what in (verify, simulate):
                ratios[kind, what.__name__] = seconds(partial(what, schedule), times=3) / generating
        return ratios

    setup_cache.timeout = 300

    def track_over_generate(self, cache, kind, what):
        return cache[kind, what]

    track_over_generate.unit = "x"
    track_over_generate.version = "1"
