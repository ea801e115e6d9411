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
    # Twice that is published, for pairs of F and B that run as one: see below. Here F passes its output on before B.
    "dualpipe-v": Published(lambda p, m, v: p - 1, lambda p, m, v: p + Fraction(1, 2), virtual=(2,)),
}


LEAST = {"zb-h2": lambda p: 2 * p - 1, "zbv": lambda p: 2 * p - 1, "dualpipe-v": lambda p: 2 * p}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_bubble_equals_the_published_formula(kind):
    """From p microbatches on, or as many as LEAST says; interleaved kinds for whole rounds of p."""
    published = PUBLISHED[kind]
    for p in (2, 3, 4, 5, 8, 9):
        for v in published.virtual:
            least = LEAST.get(kind, lambda p: p)(p)
            rounds = kind.startswith("interleaved") and v > 1
            for m in (p, 2 * p, 5 * p) if rounds else (*range(least, least + p + 1), 4 * p + 1, 6 * p):
                simulated = simulate(generate(kind, p, m, v))
                idle = published.idle(p, m, v)
                assert simulated.makespan == 3 * m * v + idle, (p, m, v)
                assert simulated.bubble == pytest.approx(idle / (3 * m * v + idle), abs=1e-12)
                if published.window_idle is not None:
                    idle = published.window_idle(p, m, v)
                    assert simulated.window_bubble == pytest.approx(idle / (3 * m * v + idle), abs=1e-12)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_ranks_that_share_cores_are_slower_while_others_compute(kind):
    ranks, microbatches, virtual = 4, 8, PUBLISHED[kind].virtual[-1]
    found = simulate(generate(kind, ranks, microbatches, virtual), Costs(1.0, 1.25, 0.75))
    times = [found.makespan_at(lambda n, cores=cores: max(1.0, n / cores)) for cores in (1, 1.5, 2, 3, 4)]
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(sum(found.work))  # somebody always computes
    assert times[2] > max(found.makespan, sum(found.work) / 2)  # a core idles at both ends
    assert times[-1] == pytest.approx(found.makespan)


def test_sharing_counts_who_computes():
    """Two stages, two microbatches: alone, together for three actions, alone."""
    found = simulate(generate("1f1b", 2, 2))
    alone = found.makespan - (together := sum(found.work) - found.makespan)
    assert found.makespan_at(lambda n: n) == pytest.approx(alone + 2 * together)


def test_dualpipe_v_of_pairs_idles_as_published():
    """(p - 1)(F&B + B - 3W) with F&B = F + B: 2(p - 1)."""
    for p, m in SIZES:
        assert _makespan_of_pairs(generate("dualpipe-v", p, m)) == 6 * m + 2 * (p - 1)


def _makespan_of_pairs(schedule):
    """When an F directly before a B begins and ends with it."""
    left = []
    for actions in schedule.actions:
        computed = [action for action in actions if action.kind in "FBIW"]
        left.append([])
        while computed:
            count = 2 if [action.kind for action in computed[:2]] == ["F", "B"] else 1
            left[-1].append(computed[:count])
            del computed[:count]
    clocks, ends = [0] * schedule.ranks, {}
    while any(left):
        for rank, items in enumerate(left):
            while items and all(need in ends for action in items[0] if (need := _input(schedule, action))):
                arrived = [ends[need] for action in items[0] if (need := _input(schedule, action))]
                took = sum(2 if action.kind == "B" else 1 for action in items[0])
                clocks[rank] = max([clocks[rank], *arrived]) + took
                ends.update({_output(action): clocks[rank] for action in items.pop(0)})
    return max(clocks)


def _input(schedule, action):
    kind, stage, microbatch, _ = action
    if kind == "F" and stage > 0:
        return "F", stage - 1, microbatch
    return ("I", stage + 1, microbatch) if kind in "BI" and stage + 1 < schedule.stages else None


def _output(action):
    return {"F": "F", "W": "W"}.get(action.kind, "I"), action.stage, action.microbatch


def test_v_half_pays_half_of_1f1bs_bubble():
    """Which is 6(p - 1) units of half a rank's F; one less with an odd number of ranks."""
    for p, m in SIZES:
        assert simulate(generate("v-half", p, m)).makespan - 6 * m == 3 * (p - 1) - p % 2


def test_v_min_pays_two_thirds_of_1f1bs_bubble():
    """4p units of half a rank's F, less a constant that does not grow with ranks."""
    for p, m in SIZES:
        assert simulate(generate("v-min", p, m)).makespan - 6 * m == 4 * p - (3 if p % 3 == 0 else 5)


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
