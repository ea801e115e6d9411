"""Interleaved stages: what the planner says of them in closed form, against the schedules that are run."""

from itertools import pairwise, product
from random import Random

import pytest

from vescale_dtensor.testing import slice_of
from vescale_pipeline import Costs, generate, simulate, verify
from vescale_plans.search import Part
from vescale_plans.search.candidates import VIRTUAL
from vescale_plans.search.pricing.interleaved import Interleaved, flights

SHAPES = [(p, v, rounds * p) for p, v, rounds in product((2, 3, 4, 8), VIRTUAL, (1, 2, 3, 5))]


def kept(schedule, rank):
    """Per moment, microbatches whose activations each stage of a rank keeps."""
    stages = schedule.stages_of(rank)
    counts = dict.fromkeys(stages, 0)
    yield tuple(counts.values())
    for action in schedule.actions[rank]:
        if action.kind in "FB":
            counts[action.stage] += 1 if action.kind == "F" else -1
            yield tuple(counts.values())


@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), slice_of(SHAPES, 12))
def test_what_is_in_flight_is_that_of_the_schedule(ranks, virtual, microbatches):
    """For stages of any sizes: the fullest of the moments named is the fullest of all."""
    schedule, random = generate("interleaved", ranks, microbatches, virtual), Random(0)
    for one in range(ranks):
        moments = set(kept(schedule, one))
        named = flights(ranks, virtual, microbatches, one)
        assert set(named) <= moments
        for _ in range(20):
            sizes = [random.randint(1, 9) for _ in range(virtual)]
            most = [max(sum(map(int.__mul__, moment, sizes)) for moment in among) for among in (moments, named)]
            assert most[0] == most[1]


@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), slice_of(SHAPES, 12))
def test_a_step_takes_what_a_simulation_of_it_takes(ranks, virtual, microbatches):
    """Exactly that for even stages; for uneven ones not much less, nor much more."""
    schedule, random = generate("interleaved", ranks, microbatches, virtual), Random(0)
    verify(schedule, transport="rank")
    stages = ranks * virtual
    for trial in range(6):
        number = stages * (trial + 1) if trial < 2 else 2 * stages + random.randrange(stages)
        parts = [Part(3.0, 1, 1, (1.0, 1)) for _ in range(number)]
        if trial > 2:
            parts[-1] = Part(3.0 + 3 * random.random(), 1, 1)
        found = Interleaved(parts, ranks, virtual, microbatches, 1e9).best()
        borders = [*found.starts, number]
        thirds = [sum(part.time for part in parts[start:stop]) / 3 for start, stop in pairwise(borders)]
        taken = simulate(schedule, Costs(thirds, thirds, thirds, 0.0)).makespan
        if trial < 2:
            assert found.seconds(microbatches) == pytest.approx(taken, rel=1e-9)
        assert 0.94 * taken <= found.seconds(microbatches) <= 1.25 * taken
