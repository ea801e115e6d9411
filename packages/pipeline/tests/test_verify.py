"""What verify says of what is wrong with a schedule."""

from dataclasses import replace

import pytest

from vescale_pipeline import Action, Costs, Schedule, ScheduleError, add_communication, generate, verify
from vescale_pipeline.schedules import GENERATORS

SCHEDULE = generate("1f1b", 2, 2)
# F00 SEND_F00 F01 SEND_F01 RECV_B00 B00 RECV_B01 B01 REDUCE0
FIRST, SECOND = SCHEDULE.actions
# RECV_F10 RECV_F11 F10 B10 SEND_B10 F11 B11 SEND_B11 REDUCE1


def _with(first=FIRST, second=SECOND, **fields):
    return replace(SCHEDULE, actions=(tuple(first), tuple(second)), **fields)


def _swapped(actions, one, two):
    changed = list(actions)
    changed[one], changed[two] = changed[two], changed[one]
    return changed


def _put(actions, place, action):
    return [*actions[:place], action, *actions[place + 1 :]]


WRONG = {
    "version": (_with(version=7), "the schedule is of version 7, not 1"),
    "ranks": (_with(ranks=0), "ranks is 0, not a positive integer"),
    "placement length": (_with(placement=(0,)), "1 stages are placed, not 2"),
    "placement": (_with(placement=(0, 2)), "stage 1 is placed on rank 2 of 2"),
    "actions length": (replace(SCHEDULE, actions=(FIRST,)), "1 ranks have actions, not 2"),
    "kind": (_with(_put(FIRST, 0, Action("G", 0, 0))), "'G' is no kind of action"),
    "short": (
        _with(second=SECOND[:-1] + (("REDUCE", 1, -1),)),
        "an action is not a kind, a stage, a microbatch and a peer",
    ),
    "type": (_with(_put(FIRST, 0, Action("F", 0, 0.5))), "a microbatch is not an integer"),
    "stage": (_with(_put(FIRST, 0, Action("F", 2, 0))), "there are stages 0 to 1\n  rank 0, action 0: F(2, 0)"),
    "owner": (_with(_put(FIRST, 0, Action("F", 1, 0))), "the stage is placed on another rank"),
    "microbatch": (_with(_put(FIRST, 0, Action("F", 0, 2))), "there are microbatches 0 to 1"),
    "reduce": (_with(_put(FIRST, 8, Action("REDUCE", 0, 0))), "REDUCE is of all microbatches, -1"),
    "no peer": (_with(_put(FIRST, 1, Action("SEND_F", 0, 0))), "its peer is not one of 2 ranks"),
    "a peer": (_with(_put(FIRST, 0, Action("F", 0, 0, 1))), "only sends and receives have a peer"),
    "dropped": (_with(FIRST[:5] + FIRST[6:]), "coverage: B(0, 0) is there 0 times, not 1"),
    "twice": (
        _with(FIRST[:1] + FIRST),
        "coverage: F(0, 0) is there 2 times, not 1\n  rank 0, action 0: F(0, 0)\n  rank 0, action 1: F(0, 0)",
    ),
    "too many": (
        _with(microbatches=10**12),
        "coverage: 18 actions cannot cover 2 stages and 1000000000000 microbatches",
    ),
    "not reduced": (_with(FIRST[:-1]), "coverage: REDUCE(0) is there 0 times, not 1"),
    "other end": (_with(_put(FIRST, 1, Action("SEND_F", 0, 0, 0))), "coverage: the other end is on rank 1"),
    "send early": (
        _with(_swapped(FIRST, 0, 1)),
        "order: SEND_F stands before F\n  rank 0, action 0: SEND_F(0, 0) to rank 1\n  rank 0, action 1: F(0, 0)",
    ),
    "receive late": (_with(_swapped(FIRST, 4, 5)), "order: the backward stands before RECV_B"),
    "reduce early": (_with(_swapped(FIRST, 7, 8)), "order: REDUCE stands before the last weight gradient"),
    "crossed": (
        _with(second=_swapped(SECOND, 0, 1)),
        "channels: the next send and the next receive between two ranks are not of the same tensor\n"
        "  rank 0, action 1: SEND_F(0, 0) to rank 1\n"
        "  rank 1, action 0: RECV_F(1, 1) from rank 0",
    ),
}


@pytest.mark.parametrize("schedule, says", WRONG.values(), ids=list(WRONG))
def test_the_error_names_the_rule_and_the_actions(schedule, says):
    with pytest.raises(ScheduleError) as raised:
        verify(schedule)
    assert says in str(raised.value)


def test_weights_before_their_gradient():
    schedule = generate("zb-h1", 2, 2)
    actions = list(schedule.actions[0])
    one, two = actions.index(("I", 0, 0, None)), actions.index(("W", 0, 0, None))
    with pytest.raises(ScheduleError, match="order: W stands before I"):
        verify(replace(schedule, actions=(tuple(_swapped(actions, one, two)), schedule.actions[1])))


def _deadlocked(*texts):
    """Two stages on two ranks from words such as F00, SEND_F00."""
    actions = []
    for rank, text in enumerate(texts):
        words = [word.rpartition("_") for word in text.split()]
        of_rank = []
        for head, underscore, tail in words:
            kind = head + underscore + tail[:-2]
            of_rank.append(Action(kind, int(tail[-2]), int(tail[-1]), 1 - rank if underscore else None))
        actions.append((*of_rank, Action("REDUCE", rank, -1)))
    return Schedule(1, "mine", 2, 2, 2, (0, 1), tuple(actions))


def test_a_deadlock_is_shown_as_the_shortest_circle():
    schedule = _deadlocked(
        "F00 SEND_F00 RECV_B00 B00 F01 SEND_F01 RECV_B01 B01",
        "RECV_F10 F10 RECV_F11 F11 B10 SEND_B10 B11 SEND_B11",
    )
    with pytest.raises(ScheduleError) as raised:
        verify(schedule, transport="buffered")
    assert str(raised.value) == (
        "verify: deadlock under the model 'buffered' of a transport\n"
        "  rank 0, before the backward of stage 0 and microbatch 0, waits for rank 1's SEND_B(1, 0) to rank 0\n"
        "  rank 1's SEND_B(1, 0) to rank 0 waits until rank 1 gets there\n"
        "  rank 1, before F of stage 1 and microbatch 1, waits for rank 0's SEND_F(0, 1) to rank 1\n"
        "  rank 0's SEND_F(0, 1) to rank 1 waits until rank 0 gets there"
    )


# Both ranks send first: no message is held up by a buffer, and none gets through without one.
FACING = _deadlocked(
    "F00 SEND_F00 F01 SEND_F01 RECV_B00 B00 RECV_B01 B01",
    "RECV_F10 F10 B10 SEND_B10 RECV_F11 F11 B11 SEND_B11",
)


def test_a_deadlock_for_want_of_a_buffer():
    assert verify(FACING, transport="buffered").deadlocks.keys() == {"pair", "rank"}
    with pytest.raises(ScheduleError) as raised:
        verify(FACING)
    assert str(raised.value) == (
        "verify: deadlock under the model 'pair' of a transport\n"
        "  rank 0's SEND_F(0, 1) to rank 1 waits behind rank 1's SEND_B(1, 0) to rank 0\n"
        "  rank 1's SEND_B(1, 0) to rank 0 waits behind rank 0's SEND_F(0, 1) to rank 1"
    )


def test_transport_is_one_of_the_models():
    with pytest.raises(ScheduleError, match="no model 'nccl' of a transport"):
        verify(SCHEDULE, transport="nccl")


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_verdict_states_what_else_is_known(kind):
    schedule = generate(kind, 4, 6)
    verdict = verify(schedule, transport="rank", budget=7)
    assert verdict.deadlocks == {} and verdict.adds_in_order
    assert max(verdict.peak_memory) <= 7


def test_a_budget_of_memory_is_kept():
    assert max(verify(generate("v-half", 8, 16), budget=5).peak_memory) == 5
    with pytest.raises(ScheduleError) as raised:
        verify(generate("1f1b", 4, 8), budget=24e9, costs=Costs(activation=8e9))
    assert "memory: rank 0 holds activations of 3.2e+10 at its peak, more than the budget of 2.4e+10" in str(
        raised.value
    )
    assert "3.2e+10, 2.4e+10, 1.6e+10, 8e+09" in str(raised.value)


def test_uneven_placements_pass():
    """Stages need not be dealt out evenly, nor every rank have one."""
    placement = (0, 0, 2, 0)
    orders = [[], [], []]
    for kind, stages in (("F", range(4)), ("B", reversed(range(4)))):
        for stage in stages:
            orders[placement[stage]] += [Action(kind, stage, microbatch) for microbatch in range(3)]
    assert verify(add_communication("mine", placement, 3, orders), transport="rank").adds_in_order
