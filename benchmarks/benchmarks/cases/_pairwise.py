"""Pairwise measurement: contenders run in turn, and only ratios within one round count.

On a shared machine the time of anything drifts by tens of percent from second to second, so a
time taken now says little about a time taken later. A ratio of two short slices taken within a
few milliseconds of each other is steady: whatever slowed one slowed the other. A race therefore
runs rounds; a round gives each contender one slice of about `slice_seconds`, in an order that
is drawn for the round, so that nobody always follows the same neighbour; a ratio is the median over the rounds.

The clock is the CPU time of the process: a slice that was preempted does not count the others'
time, and work handed to another thread still counts. The garbage collector is off. One thread,
because on tiny tensors the host cost is the subject, not a parallel loop's start-up.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from timeit import Timer

import torch


@dataclass(frozen=True)
class Ratio:
    """Median over rounds of one contender's time over another's, with its quartiles."""

    median: float
    lower: float
    upper: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.lower:.2f}, {self.upper:.2f}]"


@dataclass(frozen=True)
class Race:
    """Seconds per call of every contender in every round."""

    seconds: Mapping[str, tuple[float, ...]]

    def microseconds(self, name: str) -> float:
        """The median time of one call. For reading only: budgets are on ratios."""
        return median(self.seconds[name]) * 1e6

    def ratio(self, name: str, baseline: str) -> Ratio:
        pairs = zip(self.seconds[name], self.seconds[baseline], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        lower, middle, upper = quantiles(ratios, n=4)
        return Ratio(middle, lower, upper, len(ratios))


def timer(statement, setup="pass", **names) -> Timer:
    """A contender: a statement over `names`, compiled into the timing loop.

    A statement costs no call of a wrapper, which at 1 us per operator would be a visible part of
    the time. `setup` runs before every slice, outside its time. Either may be a callable.
    """
    return Timer(statement, setup, timer=time.process_time, globals=names)


def race(
    contenders: Mapping[str, Timer],
    *,
    rounds: int = 200,
    slice_seconds: float = 1e-3,
    calls: int | None = None,
) -> Race:
    """Runs the contenders in turn.

    Arguments:
        contenders: name -> `timer(...)`.
        rounds: slices per contender.
        slice_seconds: the length of a slice, which fixes the calls in it; must be far above the
            clock's own cost (0.5 us).
        calls: calls in a slice, instead of `slice_seconds`; 1 where `setup` has to run
            before every call.
    """
    order = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    with quiet():
        numbers = {name: calls or _calls_per_slice(contenders[name], slice_seconds) for name in order}
        for name in order:  # warm up: caches, allocator, lazily built state
            for _ in range(5):
                contenders[name].timeit(numbers[name])
        for turn in range(rounds):
            for name in random.Random(turn).sample(order, len(order)):
                seconds[name].append(contenders[name].timeit(numbers[name]) / numbers[name])
    return Race({name: tuple(values) for name, values in seconds.items()})


def _calls_per_slice(contender: Timer, slice_seconds: float) -> int:
    contender.timeit(20)  # a first call can cost a slice by itself and would end the search at 1
    calls = 1
    while (spent := contender.timeit(calls)) < slice_seconds / 2:
        calls *= 2
    return max(1, round(calls * slice_seconds / spent))


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection, one thread, and denormals flushed.

    Random data that passes many blocks can shrink to denormals, whose arithmetic is a hundred
    times slower: that would be a difference of values, not of code.
    """
    was_enabled, threads = gc.isenabled(), torch.get_num_threads()
    gc.collect()
    gc.disable()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
        if was_enabled:
            gc.enable()
