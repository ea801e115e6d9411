"""Simulated bubbles and memories are the published ones, and the simulator does what a clock would."""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import pytest

from vescale_pipeline import Costs, ScheduleError, generate, peak_memory, simulate
from vescale_pipeline.schedules import GENERATORS

SIZES = [(2, 4), (3, 6), (4, 8), (5, 10), (6, 24), (8, 32), (9, 36)]


@dataclass(frozen=True)
class Published:
    """The table of the README, at F = I = W = 1, for p ranks, m microbatches and v stages per rank.

    idle: of each rank at a barrier, and in the authors' window. peak: activations of a microbatch through all stages
    of a rank.
    """

    idle: object
    peak: object
    window_idle: object = None
    virtual: tuple[int, ...] = (1,)


PUBLISHED = {
    "gpipe": Published(lambda p, m, v: 3 * (p - 1), lambda p, m, v: m),
    "1f1b": Published(lambda p, m, v: 3 * (p - 1), lambda p, m, v: p),
    "interleaved": Published(lambda p, m, v: 3 * (p - 1), lambda p, m, v: p + Fraction(p - 1, v), virtual=(2, 3, 4)),
    "looped-bfs": Published(lambda p, m, v: 3 * (p - 1), lambda p, m, v: m, virtual=(1, 2, 3)),
    "zb-h1": Published(lambda p, m, v: p - 1, lambda p, m, v: p),
    "zb-h2": Published(lambda p, m, v: p - 1, lambda p, m, v: 2 * p - 1, lambda p, m, v: 0),
    "interleaved-zb": Published(lambda p, m, v: p - 1, lambda p, m, v: p, virtual=(1, 2, 3)),
    "zbv": Published(lambda p, m, v: p - 1, lambda p, m, v: p, lambda p, m, v: 0, virtual=(2,)),
    # Stated for pairs of F and B that run as one; F passes its output on before B here, which halves it.
    "dualpipe-v": Published(lambda p, m, v: p - 1, lambda p, m, v: p + Fraction(1, 2), virtual=(2,)),
}


def _of_whole_rounds(kind, virtual):
    return kind in ("interleaved", "interleaved-zb") and virtual > 1


@pytest.mark.parametrize("kind", PUBLISHED)
def test_bubble_equals_the_published_formula(kind):
    published = PUBLISHED[kind]
    for p, m in SIZES:
        for v in published.virtual:
            if _of_whole_rounds(kind, v):
                m = -(-m // p) * p
            simulated = simulate(generate(kind, p, m, v))
            idle = published.idle(p, m, v)
            assert simulated.makespan == 3 * m * v + idle, (p, m, v)
            assert simulated.bubble == pytest.approx(idle / (3 * m * v + idle), abs=1e-12)
            if published.window_idle is not None:
                window_idle = published.window_idle(p, m, v)
                assert simulated.window_bubble == pytest.approx(window_idle / (3 * m * v + window_idle), abs=1e-12)


@pytest.mark.parametrize("kind, share, odd", [("v-half", Fraction(1, 2), 1), ("v-min", Fraction(2, 3), 0)])
def test_controllable_memory_pays_the_published_share_of_the_bubble(kind, share, odd):
    """Half, and two thirds, of what 1F1B idles: 6(p - 1) units of half a rank's F. V-Min's share is of 6p."""
    for p, m in SIZES:
        idle = simulate(generate(kind, p, m)).makespan - 6 * m
        if kind == "v-half":
            assert idle == share * 6 * (p - 1) - (p % 2)
        else:
            assert idle == share * 6 * p - (3 if p % 3 == 0 else 5)


PEAKS = {kind: published.peak for kind, published in PUBLISHED.items()} | {
    "v-half": lambda p, m, v: Fraction(p + 2, 2),
    "v-min": lambda p, m, v: Fraction(p + 4, 3),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_peak_memory_never_exceeds_the_stated_one(kind):
    """For any numbers, those that do not divide and fewer microbatches than ranks included."""
    virtual = GENERATORS[kind].virtual
    for p in (1, 2, 3, 4, 5, 6, 7, 8, 12):
        for m in (1, 2, 3, 5, 8, 13, 24, 37):
            for v in (virtual,) if virtual else (1, 2, 3):
                stated = min(m, PEAKS[kind](p, m, v))
                assert max(peak_memory(generate(kind, p, m, v))) <= stated + 1e-9, (p, m, v)


def test_every_rank_of_the_even_kinds_keeps_as_much():
    for kind in ("zb-h1", "zbv", "dualpipe-v"):
        assert len(set(peak_memory(generate(kind, 5, 20)))) == 1
    assert peak_memory(generate("1f1b", 4, 8)) == (4, 3, 2, 1)


def test_residue_counts_until_the_weights():
    schedule = generate("zb-h1", 3, 6)
    assert peak_memory(schedule, Costs(residue=0.0)) == peak_memory(generate("1f1b", 3, 6))
    assert peak_memory(schedule, Costs(activation=[8, 4, 2], residue=1)) == (24, 9, 4)


def test_transfers_run_beside_computation_and_one_after_another():
    """Two ranks, two microbatches, GPipe: the second transfer waits for the first, and F of rank 1 for it."""
    simulated = simulate(generate("gpipe", 2, 2), Costs(forward=1, transfer=3))
    at = {str(event.action): (event.start, event.end) for event in simulated.events if event.rank == 1}
    assert at["RECV_F(1, 0) from rank 0"] == (1, 4)
    assert at["RECV_F(1, 1) from rank 0"] == (4, 7)
    assert at["F(1, 0)"] == (4, 5) and at["F(1, 1)"] == (7, 8)
    assert at["B(1, 0)"] == (8, 10) and at["B(1, 1)"] == (10, 12)
    assert simulated.makespan == 10 + 3 + 3 + 2


def test_a_receive_that_is_posted_late_holds_its_transfer_up():
    schedule = generate("gpipe", 2, 2)
    first, second = schedule.actions
    assert [a.kind for a in first[4:]] == ["RECV_B", "RECV_B", "B", "B", "REDUCE"]
    late = type(schedule)(**{**_fields(schedule), "actions": (first[:5] + (first[6], first[5]) + first[7:], second)})
    early, late = (simulate(each, Costs(transfer=3)).makespan for each in (schedule, late))
    assert (early, late) == (18, 20)


@pytest.mark.parametrize("kind", GENERATORS)
def test_critical_path_is_as_long_as_the_whole(kind):
    schedule = generate(kind, 4, 6)
    costs = Costs(forward=[1 + stage % 3 for stage in range(schedule.stages)], input_gradient=2, transfer=0.5)
    simulated = simulate(schedule, costs)
    path = simulated.critical_path
    assert path[0].start == 0 and path[-1].end == simulated.makespan
    assert all(before.end == after.start for before, after in pairwise(path))
    assert sum(event.end - event.start for event in path) == pytest.approx(simulated.makespan)


@pytest.mark.parametrize("kind", GENERATORS)
def test_no_rank_computes_two_things_at_once_or_before_its_inputs(kind):
    schedule = generate(kind, 3, 5)
    simulated = simulate(schedule, Costs(forward=1.5, input_gradient=2, weight_gradient=0.5, transfer=0.25))
    ends = {}
    for event in sorted(simulated.events, key=lambda event: event.end):
        ends[event.action[:3]] = event.end
    for rank in range(3):
        computed = [event for event in simulated.events if event.rank == rank and event.action.kind in "FBIW"]
        assert all(before.end <= after.start for before, after in pairwise(computed))
        assert [event.action for event in computed] == [a for a in schedule.actions[rank] if a.kind in "FBIW"]
    for event in simulated.events:
        action, stage, microbatch, peer = event.action
        if action == "F" and stage:
            assert event.start >= ends["F", stage - 1, microbatch]
        if peer is not None:
            assert event.end == event.start + 0.25


def test_errors_of_costs_and_of_schedules_that_wait_for_themselves():
    with pytest.raises(ScheduleError, match="forward has 3 numbers for 2 stages"):
        simulate(generate("1f1b", 2, 2), Costs(forward=[1, 2, 3]))
    schedule = generate("1f1b", 2, 2)
    without_send = tuple(a for a in schedule.actions[0] if a.kind != "SEND_F")
    broken = type(schedule)(**{**_fields(schedule), "actions": (without_send, schedule.actions[1])})
    with pytest.raises(ScheduleError, match=r"rank 1 waits before F\(1, 0\)"):
        simulate(broken)


def _fields(schedule):
    return {name: getattr(schedule, name) for name in schedule.__dataclass_fields__}
