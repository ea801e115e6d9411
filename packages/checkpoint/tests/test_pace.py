"""A save in the background rests for as long as it computes, until somebody waits for it."""

import threading
import time

import pytest
import torch

from vescale_checkpoint import load, save
from vescale_checkpoint.io import _pace
from vescale_checkpoint.io._pace import Pace
from vescale_testkit import run_ranks


class Clock:
    """A thread's CPU time, and rests, which last no time."""

    def __init__(self, pace, monkeypatch):
        self.now, self.rests, self.pace = 0.0, [], pace
        monkeypatch.setattr(time, "thread_time", lambda: self.now)
        monkeypatch.setattr(pace._hurry, "wait", self.rests.append)

    def work(self, seconds):
        self.now += seconds
        self.pace.rest()


def test_it_rests_as_long_as_it_worked(monkeypatch):
    clock = Clock(Pace(), monkeypatch)
    for seconds in (1.0, 0.5, 0.25, 0.00075, 0.00075):  # the first begins the count; what is short is added up
        clock.work(seconds)
    assert clock.rests == pytest.approx([0.5, 0.25, 0.0015])


def test_nobody_who_waits_waits_for_a_rest():
    pace = Pace()
    pace.hurry()
    pace._since = time.thread_time() - 3600.0
    pace.rest()  # returns at once


def test_a_process_that_ends_is_not_waited_for(monkeypatch):
    pace = Pace()
    clock = Clock(pace, monkeypatch)
    clock.work(1.0)
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    clock.work(1.0)
    assert clock.rests == []


def saved(path, asynchronous):
    seen, rest = [], _pace.Pace.rest
    _pace.Pace.rest = lambda self: (seen.append(threading.current_thread().name), rest(self))[1]
    try:
        state = {"w": torch.arange(1 << 20, dtype=torch.float32)}
        saving = save(path, {"model": state}, asynchronous=asynchronous)
        saving.wait()
    finally:
        _pace.Pace.rest = rest
    found = {"w": torch.zeros(1 << 20)}
    load(path, {"model": found})
    assert torch.equal(found["w"], state["w"])
    return seen, None if saving._pace is None else saving._pace._hurry.is_set()


def test_the_background_rests_and_the_caller_does_not(tmp_path):
    ((seen, hurried),) = run_ranks(1, saved, str(tmp_path / "background"), True)
    assert len(seen) >= 4 and set(seen) == {"vescale-checkpoint-save"} and hurried
    assert run_ranks(1, saved, str(tmp_path / "caller"), False) == [([], None)]
