"""A rank that is slower than the others is named, by numbers that are given: no test looks at a clock."""

import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_dtensor import CommunicationError, Shard
from vescale_dtensor._communication import flight_recorder
from vescale_plans import Plan, parallelize
from vescale_plans._apply import in_step
from vescale_plans.installed._stragglers import Stragglers, slowest
from vescale_testkit import run_ranks, warm_up

warm_up("vescale_plans")

PLANS = [
    Plan({"dp": 4}, {"*": {}}, zero=3),
    Plan({"dp": 2, "tp": 2}, {"0.*": {"tp": Shard(0)}, "1.weight": {"tp": Shard(1)}, "*": {}}),
]


def trained(plan, seconds, calls=50, option=None):
    """What rank 0 says while a call takes a rank so many seconds of its own: `seconds(rank, call)`."""
    said, now = [], 0.0
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("vescale").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_step, "Stragglers", partial(Stragglers, clock=lambda: now))
        patch.setattr("socket.gethostname", lambda: f"host-{dist.get_rank()}")
        if option:
            patch.setenv("VESCALE_SLOW_RANK", option)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        model, optimizer = parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
        try:
            for call in range(1, calls + 1):
                model(torch.ones(8, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                now += seconds(dist.get_rank(), call)
        finally:
            logging.getLogger("vescale").removeHandler(handler)
    return said


def slow(rank, call, which=2, times=2.0, base=0.1, begins=0, ends=1000):
    """Rank `which` takes `times` as long, in some of the calls."""
    return base * (times if rank == which and begins <= call < ends else 1.0)


def every(plan, cases):
    return [trained(plan, *case) for case in cases]


def again(rank, call):
    """Slow, then not, and slow again."""
    return slow(rank, call, times=1.0 if 41 <= call < 51 else 2.0)


ALIKE = [
    (partial(slow, times=1.4),),  # not much
    (partial(slow, base=0.01),),  # not long
    (partial(slow, ends=31),),  # not for long
    (partial(slow, times=1.0, base=0.3),),  # all alike
    (lambda rank, call: 0.2 if call // 10 % 4 == rank else 0.1,),  # another one each time
]


def test_it_is_named_once_with_its_host_and_times():
    first, *others = run_ranks(4, every, PLANS[0], [(slow,), (partial(slow, which=0),), (again, 90), *ALIKE])
    assert others == [[[]] * 8] * 3
    for (text,), which in zip(first, (2, 0)):
        assert text.startswith(f"rank {which} of (dp=4), on host-{which}, takes 200 ms"), text
        assert "the median is 100 ms; so at 3 checks one after another (calls 21 to 41)" in text
    assert len(first[2]) == 2 and first[3:] == [[]] * 5


def ended():
    with pytest.raises(CommunicationError) as error:
        trained(PLANS[1], slow, 60, "end")
    return str(error.value), trained(PLANS[1], partial(slow, which=3))


def test_the_job_ends_there_on_request():
    first, *others = run_ranks(4, ended)
    assert "rank 2 of (dp=2, tp=2), on host-2, takes 200 ms" in first[0]
    assert "rank 3 of (dp=2, tp=2), on host-3, takes 200 ms" in first[1][0]
    assert others == [(first[0], [])] * 3


def test_of_two_ranks_the_slower_one_is_named():
    first, _ = run_ranks(2, trained, Plan({"dp": 2}, {"*": {}}), partial(slow, which=1))
    assert first[0].startswith("rank 1 of (dp=2), on host-1")


def test_medians_of_lines():
    assert slowest([(5, 0, 5), (9, 1, 9), (6, 2, 6)]) == (9, 1, 6)
    assert slowest([(9, 1, 6), (7, 3, 5)]) == (9, 1, 5)


def test_waits_for_others_are_not_ones_own(monkeypatch):
    """Entries of the recorder: a wait from 10 s to 14 s, one that is begun and waited for later."""
    clock = iter((14.0, 20.0, 27.0, 30.0))
    monkeypatch.setattr(flight_recorder, "monotonic", lambda: next(clock))
    monkeypatch.setattr(flight_recorder, "waited_s", 0.0)
    flight_recorder.Noted((flight_recorder.WAITING, *range(6), 10.0, None)).__exit__(None, None, None)
    assert flight_recorder.own_s() == 16.0
    flight_recorder.Noted((flight_recorder.WAITING, *range(6), 25.0, None)).__exit__(None, None, None)
    assert flight_recorder.own_s() == 24.0


def waits(plan):
    """Which of the collectives of three steps were counted as waits."""
    counted, end = [], flight_recorder.Noted.__exit__
    flight_recorder.ring.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flight_recorder.Noted, "__exit__", lambda one, *how: counted.append(one[1]) or end(one, *how))
        trained(plan, slow, 3)
    return counted, [entry[1] for entry in flight_recorder.ring if entry[0] == flight_recorder.DONE]


def test_every_collective_that_is_waited_for_is_counted():
    for counted, done in run_ranks(4, waits, PLANS[0]):
        assert len(done) > 10 and {*done} == {*counted}
