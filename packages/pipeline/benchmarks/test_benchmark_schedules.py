"""pytest-benchmark: what a job pays for its schedule when it starts, at 8 ranks and 64 microbatches.

Run by a target of its own, never with the tests; nothing is asserted on time (`benchmarks/runtime/schedules.py` does).
"""

import time

import pytest

from vescale_pipeline import generate, simulate, verify
from vescale_pipeline.schedules import GENERATORS

pytestmark = [pytest.mark.benchmark(timer=time.process_time), pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("what", ["generate", "verify", "simulate"])
def test_schedules(benchmark, what, kind):
    schedule = generate(kind, 8, 64)
    benchmark.group = what
    benchmark.extra_info["actions"] = sum(map(len, schedule.actions))
    call = {
        "generate": lambda: generate(kind, 8, 64),
        "verify": lambda: verify(schedule),
        "simulate": lambda: simulate(schedule),
    }[what]
    benchmark(call)
