"""vescale_pipeline: what the runtime costs per microbatch, over torch.distributed.pipelining's (ratios)."""

from __future__ import annotations

from benchmarks.cases._script import said


class Runtime:
    """CPU time over that of the bare stages, two gloo ranks, next to no compute; ours over torch's."""

    params = (["1f1b", "interleaved", "zbv"],)
    param_names = ("schedule",)

    def setup_cache(self):
        return said("runtime/pipeline_overhead.py", "--rounds", "40", "--report-only")

    setup_cache.timeout = 420

    def track_over_torch_pipelining(self, cache, schedule):
        return cache[schedule]["ratio"]

    track_over_torch_pipelining.unit = "x"
    track_over_torch_pipelining.version = "1"
