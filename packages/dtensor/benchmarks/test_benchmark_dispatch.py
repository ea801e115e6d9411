"""pytest-benchmark: one call on 4x4 tensors. The time is its own; the ratio is in `extra_info`.

Run by a target of its own, never with the tests; nothing is asserted on time (`ratios.py` does).
"""

import time

import pytest

from benchmarks.cases import _dispatch_cases
from benchmarks.cases._headlines import dispatch_of

# CPU time, as in the races: wall time here is mostly the machine's other tenants.
pytestmark = [pytest.mark.benchmark(timer=time.process_time), pytest.mark.usefixtures("quiet")]


@pytest.fixture(scope="module", params=_dispatch_cases.CASES, ids=lambda case: case.name)
def headline(request, mesh):
    """One race per case, whoever asks for it."""
    return request.param, dispatch_of(request.param, mesh, rounds=100)


@pytest.mark.parametrize("contender", ["plain", "pass-through", "veScale", "torch DTensor"])
def test_dispatch(benchmark, mesh, headline, contender):
    case, found = headline
    if contender in found.missing:
        pytest.skip(found.missing[contender])
    benchmark.group = case.name
    benchmark.extra_info[f"over {case.floor}"] = str(found.race.ratio(contender, case.floor))
    benchmark.extra_info["budget"] = case.budget if contender == "veScale" else None
    step = _dispatch_cases.contenders(case, mesh)[contender]()
    # The compiled loop runs the statement 100 times; a round of pytest-benchmark is one loop.
    benchmark.pedantic(step.timeit, args=(100,), rounds=50, warmup_rounds=5)
