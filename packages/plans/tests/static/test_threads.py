"""While another thread of the user's runs, no call takes the layouts off what that thread may read."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import DTensor, Shard
from vescale_dtensor.engine import Storages
from vescale_dtensor.testing import fake_world
from vescale_plans import Plan, explain_static, parallelize

PLAN = Plan(mesh={"tp": 2}, parameters={"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}, "*": {}})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Calls(threading.Thread):
    """A user's kind of thread."""

    def __init__(self, function):
        super().__init__(daemon=True)
        self.function_ = function

    def run(self):
        self.function_()


class Library(threading.Thread):
    __module__ = "tqdm._monitor"


WAYS = {
    "a function": (lambda wait: threading.Thread(target=wait, daemon=True), True),
    "a class": (Calls, True),
    "a timer": (lambda wait: threading.Timer(0, wait), True),
    "a library's class": (lambda wait: Library(target=None), False),
    "a library's function": (lambda wait: threading.Thread(target=of_torch(wait), daemon=True), False),
}


def of_torch(wait):
    def run():
        wait()

    run.__module__ = "torch.utils.data._utils.pin_memory"
    return run


def recorded(regions, mode="auto"):
    """A model after the steps in which it was found static."""
    torch.manual_seed(0)
    model, _ = parallelize(PLAN, Net(), mode=mode)
    steps(regions, model, 3)
    return model


def steps(regions, model, count=1):
    regions.count = 0
    for _ in range(count):
        model(torch.ones(4, 8)).sum().backward()
    return regions.count


@pytest.mark.parametrize("mode", ["auto", "static"])
@pytest.mark.parametrize("way", WAYS)
def test_a_call_is_static_only_while_no_thread_of_the_users_runs(way, mode, regions):
    make, is_users = WAYS[way]
    with fake_world(2):
        model = recorded(regions, mode)
        assert steps(regions, model)
        may_end = threading.Event()
        other = make(may_end.wait)
        if type(other) is Library:
            other.run = may_end.wait
        other.start()
        try:
            assert bool(steps(regions, model)) is not is_users
            told = explain_static(model)
            assert told.thread == (other.name if is_users else None)
            assert (f"while the thread {other.name!r} runs" in str(told)) is is_users
        finally:
            may_end.set()
            other.join()
        assert steps(regions, model)


def test_a_thread_that_reads_while_the_model_computes_sees_global_tensors(regions):
    """The other thread reads in the middle of the up-projection, by a pair of events and not by luck."""
    found = []
    with fake_world(2):
        model = recorded(regions)
        inside, looked = threading.Event(), threading.Event()

        def look():
            inside.wait(60)
            found.append((type(model.up.weight), tuple(model.up.weight.shape)))
            looked.set()

        reader = threading.Thread(target=look, daemon=True)
        reader.start()
        gelu = F.gelu

        def slow(x):
            inside.set()
            assert looked.wait(60)
            return gelu(x)

        F.gelu = slow
        try:
            steps(regions, model)
        finally:
            F.gelu = gelu
        reader.join()
    assert found == [(DTensor, (32, 8))]


def test_a_pools_threads_look_only_while_they_run_a_users_function(regions):
    """inductor leaves an executor behind, whose threads wait."""
    with fake_world(2), ThreadPoolExecutor(2) as pool:
        model = recorded(regions)
        pool.submit(int).result()
        assert steps(regions, model)
        began, may_end = threading.Event(), threading.Event()

        def users():
            began.set()
            may_end.wait()

        running = pool.submit(users)
        assert began.wait(60)
        try:
            assert not steps(regions, model)
        finally:
            may_end.set()
        running.result()


@pytest.mark.parametrize("releases", [True, False])
def test_frames_that_a_watch_has_in_hand_decide_nothing(releases, regions, monkeypatch):
    """While it reads where the thread stands, tensors of calls that have returned live on."""
    asked, alive = [], Storages.any_alive

    def held(self, numbers):
        asked.append(None)
        return len(asked) <= 5 or not releases or alive(self, numbers)

    monkeypatch.setattr(Storages, "any_alive", held)
    may_end = threading.Event()
    watch = Library(target=None)
    watch.run = may_end.wait
    watch.start()
    try:
        with fake_world(2):
            model = recorded(regions)
            assert bool(steps(regions, model)) is releases
    finally:
        may_end.set()
        watch.join()


def test_a_model_that_a_thread_of_the_users_calls_is_eager_there(regions):
    found = []
    with fake_world(2):
        model = recorded(regions)
        caller = threading.Thread(target=lambda: found.append(steps(regions, model)))
        caller.start()
        caller.join()
        assert found == [0] and steps(regions, model)
