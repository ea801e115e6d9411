"""A process group in memory: all ranks of it put in what they have, and the last one moves the data for all.

Sends keep a copy, as gloo's small ones do; what is received in a collective is there when the last rank has come to it.
Sums are made in rank order. A collective that is not the same on all ranks is an error at once.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from vescale_dtensor import CommunicationError
from vescale_trace.values import tensors_in

from .._machine._torch_private import DisableTorchFunctionSubclass, _DisableTorchDispatch
from .turns import Turns

NAME = "simulated"
_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
Finish = Callable[[list[Any], list[Any]], None]
"""(what each rank put in, where each wants its result), in rank order."""


class Board:
    """State that the ranks of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.open: dict[int, Meeting] = {}
        self.sent: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)  # (from, to, tag)


class Meeting:
    """One collective: who has come to it, and with what."""

    def __init__(self, kind: str, finish: Finish, size: int) -> None:
        self.kind, self.finish, self.size = kind, finish, size
        self.parts: dict[int, tuple[Any, Any]] = {}
        self.done = False


class Work(dist.Work):
    """A call of one rank that may still wait for others."""

    def __init__(
        self,
        turns: Turns,
        done: Callable[[], bool],
        what: Callable[[], str],
        into: Any = (),
        end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._turns, self._done, self._what, self._into, self._end = turns, done, what, into, end

    def is_completed(self) -> bool:
        return self._done()

    def wait(self, timeout: Any = None) -> bool:
        self._turns.wait_until(self._done, self._what)
        if self._end is not None:
            self._end, end = None, self._end
            end()
        return True

    synchronize = wait

    def result(self) -> list[Tensor]:
        self.wait()
        return tensors_in(self._into)

    def get_future(self) -> Future:
        """torch reads the tensors from it, without a look at what is there."""
        future: Future = Future()
        future.set_result(self.result())
        return future


class Group(dist.ProcessGroup):
    """One rank's end of a group."""

    def __init__(self, rank: int, size: int, board: Board, turns: Turns) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._board, self._turns = rank, size, board, turns
        self._numbers = count()
        self._name = ""

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def name(self) -> str:
        return NAME

    def getBackendName(self) -> str:
        return NAME

    def _get_backend(self, device: Any) -> Group:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    @functools.cached_property
    def _ranks(self) -> list[int]:
        """All of the group; looked up on this rank's turn, for another's torch knows its own groups alone."""
        return dist.get_process_group_ranks(self)

    # --- collectives

    def _allgather_base(self, out: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        def finish(given: list[Tensor], wanted: list[Tensor]) -> None:
            whole = torch.cat([one.reshape(-1) for one in given])
            _put((one.view(-1) for one in wanted), repeat(whole))

        return self._meet("all_gather", tensor, out, finish)

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Work:
        def finish(given: list[Tensor], wanted: list[list[Tensor]]) -> None:
            for places in wanted:
                _put(places, given)

        return self._meet("all_gather (list)", tensors[0], outs[0], finish)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        operator = _operator(opts)

        def finish(given: list[Tensor], wanted: list[Tensor]) -> None:
            _put(wanted, repeat(_reduced(given, operator)))

        return self._meet(f"all_reduce ({operator})", tensors[0], tensors[0], finish)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        operator, root = _operator(opts), opts.rootRank

        def finish(given: list[Tensor], wanted: list[Tensor]) -> None:
            wanted[root].copy_(_reduced(given, operator))

        return self._meet(f"reduce ({operator}) to {root}", tensors[0], tensors[0], finish)

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        operator = _operator(opts)

        def finish(given: list[Tensor], wanted: list[Tensor]) -> None:
            whole = _reduced([one.reshape(-1) for one in given], operator)
            _put((one.view(-1) for one in wanted), whole.chunk(len(wanted)))

        return self._meet(f"reduce_scatter ({operator})", tensor, out, finish)

    def reduce_scatter(self, outs: list[Tensor], lists: list[list[Tensor]], opts: Any = None) -> Work:
        operator = _operator(opts)

        def finish(given: list[list[Tensor]], wanted: list[Tensor]) -> None:
            _put(wanted, (_reduced(list(parts), operator) for parts in zip(*given)))

        return self._meet(f"reduce_scatter (list, {operator})", lists[0], outs[0], finish)

    def alltoall_base(
        self, out: Tensor, tensor: Tensor, gets: Sequence[int], gives: Sequence[int], opts: Any = None
    ) -> Work:
        def finish(given: list[tuple], wanted: list[tuple]) -> None:
            rows = [_split(one, sizes, len(given)) for one, sizes in given]
            for at, (place, sizes) in enumerate(wanted):
                parts = [row[at] for row in rows]
                for one, part in zip(_split(place, sizes, len(given)), parts):
                    if one.numel() != part.numel():
                        raise CommunicationError(
                            "all_to_all", f"{part.numel()} elements are sent where {one.numel()} are taken"
                        )
                torch.cat([part.reshape(-1) for part in parts], out=place.view(-1))

        return self._meet("all_to_all", (tensor, list(gives)), (out, list(gets)), finish)

    def alltoall(self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Work:
        def finish(given: list[list[Tensor]], wanted: list[list[Tensor]]) -> None:
            for places, parts in zip(wanted, zip(*given)):
                _put(places, parts)

        return self._meet("all_to_all (list)", tensors, outs, finish)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        root = opts.rootRank

        def finish(given: list[Tensor], wanted: list[Tensor]) -> None:
            _put((one for rank, one in enumerate(wanted) if rank != root), repeat(given[root]))

        return self._meet(f"broadcast from {root}", tensors[0], tensors[0], finish)

    def gather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Work:
        root = opts.rootRank

        def finish(given: list[Tensor], wanted: list[list[list[Tensor]]]) -> None:
            _put(wanted[root][0], given)

        return self._meet(f"gather to {root}", tensors[0], outs, finish)

    def scatter(self, outs: list[Tensor], lists: list[list[Tensor]], opts: Any) -> Work:
        root = opts.rootRank

        def finish(given: list[list[list[Tensor]]], wanted: list[Tensor]) -> None:
            _put(wanted, given[root][0])

        return self._meet(f"scatter from {root}", lists, outs[0], finish)

    def barrier(self, opts: Any = None) -> Work:
        return self._meet("barrier", None, None, lambda given, wanted: None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # Newer names of torch's for the same.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    # --- sends and receives

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        self._board.sent[self._rank, peer, tag].append(tensors[0].detach().clone())
        return Work(self._turns, lambda: True, str)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        queue = self._board.sent[peer, self._rank, tag]

        def end() -> None:
            with torch.no_grad():
                tensors[0].copy_(queue.popleft().view(tensors[0].shape))

        place = self._ranks[peer]
        return Work(self._turns, lambda: bool(queue), lambda: f"a message of rank {place} (tag {tag})", tensors, end)

    # --- inside

    def _meet(self, kind: str, given: Any, wanted: Any, finish: Finish) -> Work:
        number, board = next(self._numbers), self._board
        meeting = board.open.get(number)
        if meeting is None:
            meeting = board.open[number] = Meeting(kind, finish, self._size)
        ranks = self._ranks
        if meeting.kind != kind:
            first = ranks[next(iter(meeting.parts))]
            raise CommunicationError(
                "simulate",
                f"collective {number} of ranks {_short(ranks)} is not the same on all: "
                f"rank {first} is in {meeting.kind}, rank {ranks[self._rank]} in {kind}",
            )
        meeting.parts[self._rank] = given, wanted
        if len(meeting.parts) == self._size:
            del board.open[number]
            parts = [meeting.parts[rank] for rank in range(self._size)]
            with torch.no_grad(), DisableTorchFunctionSubclass(), _DisableTorchDispatch():
                meeting.finish([one for one, _ in parts], [one for _, one in parts])
            meeting.parts.clear()  # nobody holds what it sent for longer than others take
            meeting.done = True

        def what() -> str:
            return f"{kind}, number {number} of the group of ranks {_short(ranks)}"

        return Work(self._turns, lambda: meeting.done, what, wanted)


def _unknown(name: str) -> Callable[..., Any]:
    def refuse(self: Group, *args: Any, **kwargs: Any) -> Any:
        rule = f"{name} is not simulated: collectives of one tensor each, send and recv are"
        raise CommunicationError("simulate", rule, (), [("torchrun", "gloo's processes")])

    return refuse


for _name in (
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce_coalesced"),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("_start_coalescing", "_end_coalescing", "recv_anysource", "split_group", "merge_remote_group"),
):
    setattr(Group, _name, _unknown(_name))


def _put(places: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for place, value in zip(places, values):
        place.copy_(value)


def _operator(opts: Any) -> str:
    """The name of a reduction."""
    asked = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    return next((name for name in _REDUCE if asked == getattr(dist.ReduceOp, name)), str(asked))


def _reduced(tensors: list[Tensor], operator: str) -> Tensor:
    if operator not in _REDUCE:
        raise CommunicationError("simulate", f"no reduction {operator}: one of {', '.join(_REDUCE)}")
    total = tensors[0].clone()
    for one in tensors[1:]:
        total = _REDUCE[operator](total, one)
    return total / len(tensors) if operator == "AVG" else total


def _split(tensor: Tensor, sizes: list[int], count: int) -> Sequence[Tensor]:
    return tensor.split(sizes) if sizes else tensor.chunk(count)


def _short(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"
