"""Interleaved stages: what the planner says of them in closed form, against the schedules that are run."""

from itertools import pairwise, product
from random import Random

import pytest

from vescale_pipeline import Costs, generate, simulate, verify
from vescale_plans.search import Part
from vescale_plans.search.candidates import VIRTUAL
from vescale_plans.search.pricing.interleaved import Interleaved
from vescale_plans.search.stages import Load, Moment, held_at, moments
from vescale_testkit import slice_of

SHAPES = [(p, v, rounds * p) for p, v, rounds in product((2, 3, 4, 8), VIRTUAL, (1, 2, 3, 5))]
PLAIN = [(p, 1, more) for p in (2, 3, 4, 8) for more in (1, p - 1, p, p + 1, 3 * p)]


def before_backwards(schedule, rank):
    """Per backward of a rank: microbatches that each of its stages keeps, whether each had a backward, and the stage
    that has one."""
    stages = schedule.stages_of(rank)
    flight, summed = dict.fromkeys(stages, 0), dict.fromkeys(stages, False)
    for action in schedule.actions[rank]:
        if action.kind == "B":
            yield Moment(tuple(flight.values()), tuple(summed.values()), stages.index(action.stage))
            flight[action.stage], summed[action.stage] = flight[action.stage] - 1, True
        elif action.kind == "F":
            flight[action.stage] += 1


@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), slice_of([*SHAPES, *PLAIN], 16))
def test_what_is_in_flight_is_that_of_the_schedule(ranks, virtual, microbatches):
    """For stages of any sizes: the fullest of the moments named is the fullest of all."""
    kind, random = "interleaved" if virtual > 1 else "1f1b", Random(0)
    schedule = generate(kind, ranks, microbatches, virtual)
    for one in range(ranks):
        all_of = set(before_backwards(schedule, one))
        named = moments(ranks, virtual, microbatches, one)
        assert set(named) <= all_of
        for _ in range(20):
            begins, ends, fresh = (random.randint(0, 9) for _ in range(3))
            loads = [Load(random.randint(1, 9), begins, ends, fresh) for _ in range(virtual)]
            most = [max(held_at(loads, among))[:2] for among in (all_of, named)]
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
        found = Interleaved(parts, ranks, microbatches, 1e9, virtual=virtual).best()
        borders = [*found.starts, number]
        thirds = [sum(part.time for part in parts[start:stop]) / 3 for start, stop in pairwise(borders)]
        taken = simulate(schedule, Costs(thirds, thirds, thirds, 0.0)).makespan
        if trial < 2:
            assert found.seconds(microbatches) == pytest.approx(taken, rel=1e-9)
        assert 0.94 * taken <= found.seconds(microbatches) <= 1.25 * taken
