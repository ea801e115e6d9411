"""Finds ranks that stopped without dying, and tells those that wait where no connection closes.

A stopped process (SIGSTOP, a machine that hangs) keeps its connections open, and on
NCCL a failure closes none that anybody waits for. So a thread in every process shows
that it lives, by a count in the store, and looks, for each pipeline with a call under
way, for a first cause and for the next rank's count: a ring, so that the cost does not
grow with the ranks. Only the time counts in which this process itself ran: one that was
stopped takes nobody for dead.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from itertools import count
from typing import Any, Protocol

import torch.distributed as dist

from .faults import Faults

BEAT_S = 1.0
"""Seconds between a process's signs of life."""
SILENT_S = 60.0
"""Seconds that a rank without signs of life is waited for."""


class Watched(Protocol):
    """A pipeline, as this module sees it."""

    faults: Faults
    ranks: list[int]

    def waits(self) -> bool:
        """True if a failure of others matters now: in a call, or always where the device runs behind the host."""

    def wake(self) -> None:
        """Ends all waits of this rank, from another thread."""


class Pulse:
    """The thread of this process. Cost: two requests to the store per BEAT_S, one where nothing waits."""

    def __init__(self, store: Any) -> None:
        self.silent_s = SILENT_S
        self._store = store.clone()  # torch locks its own one while it waits
        self._rank = dist.get_rank()
        self._pipelines: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._silent: dict[int, tuple[bytes, float]] = {}  # rank -> its last count, and for how long it is the last
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vescale-pipeline-pulse", daemon=True)
        self._thread.start()

    def add(self, pipeline: Watched) -> None:
        """Watches from now on; until it is collected, or the process ends."""
        following = pipeline.ranks[(pipeline.ranks.index(self._rank) + 1) % len(pipeline.ranks)]
        for key in (pipeline.faults.key, _beat(following)):  # `multi_get` waits for keys that are not there
            self._store.compare_set(key, "", "")
        self._pipelines.add(pipeline)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(timeout=2 * BEAT_S)

    def _run(self) -> None:
        looked = time.monotonic()
        for beat in count(1):
            if self._over.wait(BEAT_S) or not dist.is_initialized():
                return
            now = time.monotonic()
            elapsed, looked = min(now - looked, 2 * BEAT_S), now
            waiting = [pipeline for pipeline in list(self._pipelines) if pipeline.waits()]
            try:
                self._store.set(_beat(self._rank), str(beat))
                for pipeline in waiting:
                    self._look_after(pipeline, elapsed)
            except RuntimeError:
                for pipeline in waiting:
                    self._fail(pipeline, "the process that holds the ranks' store does not answer: see what ended it")
            del waiting

    def _look_after(self, pipeline: Watched, elapsed: float) -> None:
        ranks = pipeline.ranks
        following = ranks[(ranks.index(self._rank) + 1) % len(ranks)]
        cause, beat = self._store.multi_get([pipeline.faults.key, _beat(following)])
        if cause:
            self._fail(pipeline, cause.decode())
            return
        last, silent = self._silent.get(following, (b"", 0.0))
        silent = silent + elapsed if beat == last else 0.0
        self._silent[following] = beat, silent
        if silent > self.silent_s:
            self._fail(
                pipeline,
                f"rank {following} fell silent: rank {self._rank} saw no sign of life for {self.silent_s:g} s; it was "
                "stopped, or its machine or network is gone",
            )

    def _fail(self, pipeline: Watched, cause: str) -> None:
        pipeline.faults.publish(cause, self._store)
        self._pipelines.discard(pipeline)
        pipeline.wake()


def watch(pipeline: Watched) -> None:
    """Watches over a pipeline of several ranks from now on."""
    global _pulse, _world
    if len(pipeline.ranks) == 1 or dist.get_backend() in ("fake", "simulated"):
        return
    if _pulse is None or _world is not dist.group.WORLD:
        if _pulse is None:
            atexit.register(stop)
        else:
            _pulse.stop()
        _pulse, _world = Pulse(pipeline.faults.store), dist.group.WORLD
    _pulse.add(pipeline)


def stop() -> None:
    """Ends the thread: before the interpreter ends, which a thread in the store's code would abort."""
    if _pulse is not None:
        _pulse.stop()


def _beat(rank: int) -> str:
    return f"vescale_pipeline/beat/{rank}"


_pulse: Pulse | None = None
_world: Any = None
