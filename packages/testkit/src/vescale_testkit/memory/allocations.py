"""Records what the CPU's allocator gives out and takes back while something runs, as torch's profiler is told it.

Nothing of ours is in between: a storage of no bytes, a kernel's scratch, what autograd and a communication library
keep, all of it is asked of the allocator. Not seen: what a kernel's own library allocates for itself (MKL, oneDNN),
and what threads without a profiler allocate; of what they take back, the total knows. Gloo lets go of a buffer when its
thread comes to it, which on a loaded machine may be many operators later: so whoever waits for a collective gives that
thread its turn.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Iterator

from torch.distributed import Work
from torch.profiler import ProfilerActivity, profile, record_function


class Allocations:
    """Records of `allocations`."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, int, int]] = []  # when, address, bytes given or (negative) taken, total
        self._phases: list[tuple[int, int, str]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within the block, what is allocated is counted as `name`; the innermost phase counts."""
        with record_function(_PHASE + name):
            yield

    def peak(self, phase: str, time: int = -1) -> Counter[str]:
        """Returns, at the worst moment of a phase (of those of that name, the one that came at place `time`), bytes by
        the phases that they were allocated in; "" outside of all. Where other threads allocate too, who gave an address
        back before whom is told by the clock, so that the sum may be off `total` by a few tensors."""
        start, stop, _ = [one for one in self._phases if one[2] == phase][time]
        inside = [at for at, event in enumerate(self._events) if start <= event[0] <= stop]
        worst = max(inside, key=lambda at: self._events[at][3])
        live: dict[int, tuple[str, int]] = {}
        for when, address, size, _ in self._events[: worst + 1]:
            if size > 0:
                live[address] = (self._phase_of(when), size)
            else:
                live.pop(address, None)
        return _sums(live)

    def total(self, phase: str, time: int = -1) -> int:
        """Bytes at that moment, by the allocator's own count."""
        start, stop, _ = [one for one in self._phases if one[2] == phase][time]
        return max(total for when, _, _, total in self._events if start <= when <= stop)

    def _phase_of(self, when: int) -> str:
        around = ((stop - start, name) for start, stop, name in self._phases if start <= when <= stop)
        return min(around, default=_NONE)[1]

    def _take(self, recorded: profile) -> None:
        stack = list(recorded.profiler.kineto_results.experimental_event_tree())
        while stack:
            event = stack.pop()
            stack.extend(event.children)
            if event.name == "[memory]":
                fields = event.extra_fields
                self._events.append((event.start_time_ns, fields.ptr, fields.alloc_size, fields.total_allocated))
            elif event.name.startswith(_PHASE):
                self._phases.append((event.start_time_ns, event.end_time_ns, event.name.removeprefix(_PHASE)))
        self._events.sort(key=lambda one: one[0])
        self._phases.sort()
        before = self._events[0][3] - self._events[0][2] if self._events else 0
        self._events = list(_apart(self._events, before))


_PHASE, _NONE = "phase: ", (0, "")
_TURN_S = 0.004
"""Seconds that other threads are given after a collective."""


def _apart(events: list[tuple[int, int, int, int]], before: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields events with totals of what was allocated since the first event alone: what lived before, and is freed
    meanwhile, was never in them."""
    ours: set[int] = set()
    for when, address, size, total in events:
        if size > 0:
            ours.add(address)
        elif address in ours:
            ours.remove(address)
        else:
            before += size
        yield when, address, size, total - before


def _sums(live: dict[int, tuple[str, int]]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for phase, size in live.values():
        counted[phase] += size
    return counted


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    wait = Work.wait

    def waited(*args) -> bool:
        done = wait(*args)
        time.sleep(_TURN_S)
        return done

    Work.wait = waited
    try:
        yield
    finally:
        Work.wait = wait


@contextlib.contextmanager
def allocations() -> Iterator[Allocations]:
    """Records what is allocated in the block, on this thread and those of its backwards; read it afterwards.

    What lives at its beginning is not counted::

        with allocations() as log:
            with log.phase("step"):
                loss = model(x).sum()
                loss.backward()
        log.total("step"), log.peak("step")
    """
    gc.collect()
    log = Allocations()
    # There is one cycle, all of which is kept; without a word on that torch 2.11 warns.
    with _patient(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        yield log
    log._take(recorded)
