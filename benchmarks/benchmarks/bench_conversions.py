"""vescale_dtensor: what moving a tensor from one layout to another costs the host (ratios, lower is better)."""

from __future__ import annotations

from benchmarks.cases import _conversion_cases
from benchmarks.cases._fake_group import fake_mesh


class Conversions:
    """`redistribute` of 64x64 on 8 fake ranks, over torch DTensor's; what that cannot, over ours of Shard(0) to R."""

    params = (list(_conversion_cases.CASES),)
    param_names = ("conversion",)

    def setup_cache(self):
        with fake_mesh() as mesh:
            return {name: _conversion_cases.ratio(name, mesh) for name in _conversion_cases.CASES}

    setup_cache.timeout = 300

    def track_over_baseline(self, cache, conversion):
        return cache[conversion]

    track_over_baseline.unit = "x"
    track_over_baseline.version = "1"
