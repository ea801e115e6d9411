"""Many ranks in this process, with values: to look at, to step through, to test."""

from __future__ import annotations

import contextlib
import copy
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from vescale_dtensor import CommunicationError, MeshError
from vescale_dtensor.engine import simulated

from ._machine._torch_private import _set_thread_isolation_mode, c10d_world, is_registered, leave_unrecorded
from ._simulation.group import NAME, Board, Group
from ._simulation.processor import one_processor
from ._simulation.state import RankState
from ._simulation.store import Store
from ._simulation.turns import Ended, Turns

MOST_RANKS = 4096  # each is a thread


def simulate(function: Callable[..., Any], *args: Any, ranks: int = 8, **kwargs: Any) -> list[Any]:
    """Calls `function` on every rank of a world of `ranks` ranks, all in this process. Returns the results in rank
    order.

        def train():
            model, optimizer = vescale.parallelize(plan, Model(), torch.optim.AdamW)
            ...
            return model(batch).weight

        weights = vescale.simulate(train, ranks=8)
        weights[3].to_local()                        # what rank 3 holds

    Each rank runs in its own thread, one at a time, and yields where it waits for another, in a collective or a
    receive. Rank 0 runs in this thread, so debuggers and notebooks work; `vescale.breakpoint()` stops all ranks. Each
    rank has its own default group, random state of torch, Python and numpy, hooks, and RANK in the environment;
    generators start from their current state. Numbers are bitwise those of the same number of gloo processes: each rank
    computes with one thread, and all ranks share one processor.

    Arguments:
        function: what a rank does. It makes its own model, or takes one as an argument.
        args, kwargs: for the function; every rank gets a copy.
        ranks: of the world. All tensors are in this process's memory: one model per rank, if nothing is sharded.

    Raises the error of the first rank that raised, with a note that names the rank; CommunicationError at once if all
    ranks wait for each other, with what each waits for; MeshError inside a rank of a world of several, or without
    ranks.
    """
    world = World(ranks)
    given = [copy.deepcopy((args, kwargs)) for _ in range(ranks)]
    return world.call(lambda rank: function(*given[rank][0], **given[rank][1]), is_last=True)


class World:
    """Simulated ranks, from their first call to the last: a thread each, but for rank 0, which is the caller's."""

    def __init__(self, ranks: int) -> None:
        if dist.is_initialized() and (dist.get_world_size() > 1 or dist.get_backend() == NAME):
            world = f"rank {dist.get_rank()} of a world of {dist.get_world_size()}"
            raise MeshError(
                "simulate", f"this is {world} already", (), [("a process of its own, without torchrun", "")]
            )
        if not 1 <= ranks <= MOST_RANKS:
            raise MeshError("simulate", f"{ranks} ranks: 1 to {MOST_RANKS:,} are possible", (), [("ranks=8", "")])
        self.ranks, self.has_ended = ranks, False
        self.why = ""  # what ended it, if an error did
        self._first_group = next(_worlds) * _MOST_GROUPS  # torch knows groups of all worlds of a thread by number
        self._turns: Turns | None = None
        self._boards: dict[str, Board] = {}
        self._values: dict[str, bytes] = {}
        self._stores: list[Store] = []  # torch keeps the half of a store that is written in C++
        self._calls: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(ranks)]
        self._done = threading.Semaphore(0)

    def call(self, function: Callable[[int], Any], *, is_last: bool) -> list[Any]:
        """The results of `function(rank)` on every rank. With `is_last` the world ends, or where one raises what the
        others do not; an error that all raise alike, with nothing under way, leaves it."""
        results: list[Any] = [None] * self.ranks
        with self._entered() as turns, one_processor() as bind:

            def run(rank: int) -> None:
                torch.set_num_threads(1)
                bind()
                turns.begin(rank)
                try:
                    with torch.autograd.set_multithreading_enabled(False):
                        if not dist.is_initialized():
                            c10d_world().group_count = self._first_group
                            self._stores.append(Store(self._values, turns))
                            dist.init_process_group(NAME, store=self._stores[-1], rank=rank, world_size=self.ranks)
                        results[rank] = function(rank)
                except Ended:
                    pass
                except BaseException as error:
                    if is_last or not isinstance(error, Exception):
                        turns.fail(rank, error)
                    else:
                        turns.raised[rank] = error  # the others may raise the same
                finally:
                    if is_last:
                        with contextlib.suppress(Exception):
                            dist.destroy_process_group()
                    turns.end(rank)

            for calls in self._calls[1:]:
                calls.put(run)
            run(0)
            for _ in range(1, self.ranks):
                self._done.acquire()
        failed, failure = turns.failed, turns.failure
        if failure is None and turns.raised:
            failed, failure = next(iter(turns.raised.items()))
        if is_last:
            self.has_ended = True
            for calls in self._calls[1:]:
                calls.put(None)
        elif failure is not None and not self._is_alike(turns):
            text = f"{type(failure).__name__}: {failure}".partition("\n")[0]
            self.why = f"rank {failed} raised {text}"
            with contextlib.suppress(CommunicationError):
                self.call(lambda rank: None, is_last=True)
        if failure is not None:
            if isinstance(failure, Exception):
                failure.add_note(f"(raised on rank {failed} of {self.ranks}, simulated)")
            raise failure
        return results

    def _is_alike(self, turns: Turns) -> bool:
        """True if all ranks have raised the same, and nothing that some of them began waits for others."""
        kinds = {(type(error), str(error)) for error in turns.raised.values()}
        is_over = not any(board.open or any(board.sent.values()) for board in self._boards.values())
        return turns.failure is None and len(turns.raised) == self.ranks and len(kinds) == 1 and is_over

    @contextlib.contextmanager
    def _entered(self) -> Iterator[Turns]:
        """The ranks' turns, and a backend that knows them; afterwards all is as it was before."""
        outside, threads = RankState(0, 1), torch.get_num_threads()
        outside.leave()
        if self._turns is None:
            self._turns = Turns(self.ranks)
            for rank in range(1, self.ranks):
                threading.Thread(target=self._live, args=(rank,), name=f"rank {rank}", daemon=True).start()
        turns = self._turns
        turns.start()

        def create(store: dist.Store, rank: int, size: int, timeout: Any) -> Group:
            if rank == 0:
                store.set("simulated", str(next(_numbers)))
            name = store.get("simulated").decode()
            return Group(rank, size, self._boards.setdefault(name, Board(size)), turns)

        if not is_registered(NAME):
            dist.Backend.register_backend(NAME, lambda *given: _create[-1](*given), devices=["cpu"])
            leave_unrecorded(NAME)
        _create.append(create)
        _set_thread_isolation_mode(True)
        try:
            with simulated(NAME, turns):
                yield turns
        finally:
            _set_thread_isolation_mode(False)
            _create.pop()
            outside.come_back()
            torch.set_num_threads(threads)

    def _live(self, rank: int) -> None:
        while (run := self._calls[rank].get()) is not None:
            run(rank)
            self._done.release()


_create: list[Callable] = []  # how a group is made, in the simulation that runs
_numbers = itertools.count()
_worlds = itertools.count()
_MOST_GROUPS = 1_000_000  # that one world makes
