"""pytest-benchmark: four Llama blocks, both ways, under tensor and sequence parallelism on 8 ranks.

Run by a target of its own, never with the tests; nothing is asserted on time (`ratios.py` does).
"""

import time

import pytest

from benchmarks.cases import _block_cases, _headlines

# CPU time, as in the races: wall time here is mostly the machine's other tenants.
pytestmark = [pytest.mark.benchmark(timer=time.process_time), pytest.mark.usefixtures("quiet")]


@pytest.fixture(scope="module")
def headline(mesh):
    return _headlines.blocks(mesh, rounds=60)


@pytest.mark.parametrize("contender", ["by hand", "veScale", "torch DTensor"])
def test_blocks(benchmark, mesh, headline, contender):
    if contender in headline.missing:
        pytest.skip(headline.missing[contender])
    benchmark.group = headline.name
    benchmark.extra_info["over by hand"] = str(headline.race.ratio(contender, headline.floor))
    benchmark.extra_info["budget"] = headline.budget if contender == "veScale" else None
    benchmark.extra_info["collectives"] = headline.collectives[contender]
    step = _block_cases.contenders(mesh)[contender]()
    benchmark.pedantic(step.timeit, args=(1,), rounds=40, warmup_rounds=3)
