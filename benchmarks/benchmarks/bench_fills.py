"""vescale_rng: what filling a shard costs (ratios, lower is better)."""

from __future__ import annotations

from benchmarks.cases import _fill_cases
from benchmarks.cases._fake_group import fake_mesh


class Fills:
    """A fill of a shard over stock torch's: of the whole tensor (stream torch), of the shard alone (philox)."""

    params = (list(_fill_cases.FILLS), list(_fill_cases.LAYOUTS), list(_fill_cases.BASELINES))
    param_names = ("fill", "layout", "stream")

    def setup_cache(self):
        found = {}
        with fake_mesh() as mesh:
            for fill, layout in _fill_cases.cases():
                race = _fill_cases.run(mesh, fill, layout, rounds=15)
                for stream, baseline in _fill_cases.BASELINES.items():
                    found[fill, layout, stream] = race.ratio(stream, baseline).median
        return found

    setup_cache.timeout = 300

    def track_over_stock_torch(self, cache, fill, layout, stream):
        return cache[fill, layout, stream]

    track_over_stock_torch.unit = "x"
    track_over_stock_torch.version = "1"
