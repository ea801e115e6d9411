"""vescale_dtensor: what a call costs, and what four Llama blocks cost (ratios, lower is better)."""

from __future__ import annotations

from benchmarks.cases import _dispatch_cases, _headlines
from benchmarks.cases._fake_group import fake_mesh

CONTENDERS = ("veScale", "torch DTensor")


class _Ratios:
    """All races are run once, in `setup_cache`; the tracked numbers are read from it.

    A contender that could not run is skipped, so that a commit without it has no point.
    """

    def setup(self, cache, *chosen):
        *case, contender = chosen
        if contender not in cache[case[0] if case else _BLOCKS]:
            raise NotImplementedError


_BLOCKS = "blocks"


def _ratios(headline: _headlines.Headline) -> dict[str, float]:
    return {name: headline.ratio(name) for name in headline.race.seconds}


class Dispatch(_Ratios):
    """One call on 4x4 tensors, over the empty pass-through (backward: over plain)."""

    params = ([case.name for case in _dispatch_cases.CASES], list(CONTENDERS))
    param_names = ("case", "contender")

    def setup_cache(self):
        with fake_mesh() as mesh:
            return {each.name: _ratios(each) for each in _headlines.dispatch(mesh, rounds=150)}

    setup_cache.timeout = 300

    def track_over_floor(self, cache, case, contender):
        return cache[case][contender]

    track_over_floor.unit = "x"
    track_over_floor.version = "1"


class LlamaBlocks(_Ratios):
    """Four blocks under TP+SP on 8 fake ranks, both ways, over the hand-written ones."""

    params = (list(CONTENDERS),)
    param_names = ("contender",)

    def setup_cache(self):
        with fake_mesh() as mesh:
            return {_BLOCKS: _ratios(_headlines.blocks(mesh, rounds=80))}

    setup_cache.timeout = 300

    def track_over_by_hand(self, cache, contender):
        return cache[_BLOCKS][contender]

    track_over_by_hand.unit = "x"
    track_over_by_hand.version = "1"
