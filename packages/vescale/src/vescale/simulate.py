"""Many ranks in this process, with values: to look at, to step through, to test."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]

from vescale_dtensor import MeshError
from vescale_dtensor.engine import simulated

from ._simulation.group import NAME, Board, Group
from ._simulation.state import RankState
from ._simulation.store import Store
from ._simulation.turns import Ended, Turns


def simulate(function: Callable[..., Any], *args: Any, ranks: int = 8, **kwargs: Any) -> list[Any]:
    """Calls `function` on every rank of a world of `ranks` within this process; the results, in rank order.

        def train():
            model, optimizer = vescale.parallelize(plan, Model(), torch.optim.AdamW)
            ...
            return model(batch).weight

        weights = vescale.simulate(train, ranks=8)
        weights[3].to_local()                        # what rank 3 holds

    Each rank runs in a thread of its own, one at a time, and hands over where it waits for another: in a collective, or
    a receive. Rank 0 runs in this thread, so that debuggers and notebooks work; `vescale.breakpoint()` stops all ranks.
    The default group, torch's, Python's and numpy's random state, hooks, RANK in the environment are each rank's
    own; generators begin where they stand here. Numbers are those of as many processes on gloo, to the bit: one thread
    computes for a rank.

    Arguments:
        function: what a rank does: it makes its model itself, or takes it as an argument.
        args, kwargs: for the function; every rank gets a copy.
        ranks: of the world. All tensors are in this process's memory: so many models, where nothing is sharded.

    Raises what the rank raised that did so first, with a note that says which; CommunicationError at once, where all
    ranks wait for each other, with who waits for what; MeshError in a rank of a world of several, or without ranks.
    """
    if dist.is_initialized() and (dist.get_world_size() > 1 or dist.get_backend() == NAME):
        world = f"rank {dist.get_rank()} of a world of {dist.get_world_size()}"
        raise MeshError("simulate", f"this is {world} already", (), [("a process of its own, without torchrun", "")])
    if ranks < 1:
        raise MeshError("simulate", f"{ranks} ranks: at least one is needed", (), [("ranks=8", "")])
    given = [copy.deepcopy((args, kwargs)) for _ in range(ranks)]
    results: list[Any] = [None] * ranks
    values: dict[str, bytes] = {}
    stores: list[Store] = []  # torch keeps the half of a store that is written in C++
    boards: dict[str, Board] = {}

    with _prepared(ranks, boards) as turns:

        def run(rank: int) -> None:
            torch.set_num_threads(1)
            turns.begin(rank)
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    stores.append(Store(values, turns))
                    dist.init_process_group(NAME, store=stores[-1], rank=rank, world_size=ranks)
                    results[rank] = function(*given[rank][0], **given[rank][1])
            except Ended:
                pass
            except BaseException as error:
                turns.fail(rank, error)
            finally:
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
                turns.end(rank)

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(1, ranks)
        ]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
    if turns.failure is not None:
        if isinstance(turns.failure, Exception):
            turns.failure.add_note(f"(raised on rank {turns.failed} of {ranks}, simulated)")
        raise turns.failure
    return results


@contextlib.contextmanager
def _prepared(ranks: int, boards: dict[str, Board]) -> Iterator[Turns]:
    """Turns of as many ranks, a backend that knows them; afterwards all is as it was before."""
    outside, threads = RankState(0, 1), torch.get_num_threads()
    outside.leave()
    turns = Turns(ranks)

    def create(store: dist.Store, rank: int, size: int, timeout: Any) -> Group:
        if rank == 0:
            store.set("simulated", str(next(_numbers)))
        name = store.get("simulated").decode()
        return Group(rank, size, boards.setdefault(name, Board(size)), turns)

    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, lambda *given: _create[-1](*given), devices=["cpu"])
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


_create: list[Callable] = []  # how a group is made, in the simulation that runs
_numbers = itertools.count()
