"""The process group of the second device: what NCCL may do to a program, done every time.

    collective        the same on all ranks, in the same order per communicator; else an error that names both
    outputs           poison until `wait()`; with `async_op=False` valid at once for what the stream does next
    memory in flight  must stay as it is: `wait()` says what was written, and which collective it belonged to
    send, receive     without tags; alone: one queue per pair of ranks, both directions in one; in a batch: on the
                      communicator's own stream. A send ends when its receive was reached, and not before
    tensors           of the device, contiguous, of NCCL's dtypes
    wait(timeout)     blocks the host, as `barrier` does; `wait()` alone does not
    abort             ends what is pending here, with an error; the other ranks notice nothing
    destroy           waits for what is pending, as NCCL does: here until `HANG_SECONDS`

Sums are made as a ring makes them: of the n chunks, chunk c begins with rank c + 1. Whoever waits longer than
`HANG_SECONDS` is told what it waits for, and what the other ranks did last.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._device import _asker
from ._memory import Flight, InFlightError, read, write
from ._queue import DeviceError, Operation, Part, Queue, changed, wait_until, wire
from ._wire import Message

HANG_SECONDS = float(os.environ.get("VESCALE_SECOND_HANG_SECONDS", "20"))
DTYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
_extension: ModuleType | None = None


def register(extension: ModuleType) -> None:
    """Makes `second` a backend of torch.distributed, and the device's default."""
    global _extension
    _extension = extension
    if "second" not in dist.Backend.backend_list:
        dist.Backend.register_backend("second", _create, devices=["second"])


def _create(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
    group = Group(store, rank, size)
    groups.append(group)
    return _extension.backend(rank, size, group)


groups: list[Group] = []
"""All groups of this process that were not destroyed."""


class Work:
    """A call in flight; `number` counts the calls of its group."""

    def __init__(self, group: Group, operation: Operation, flight: Flight, deliver: Callable[[], None]) -> None:
        self.number = group.calls
        self._group, self._operation, self._flight, self._deliver = group, operation, flight, deliver
        self._polls = 2
        group.undelivered[id(self)] = self

    @property
    def label(self) -> str:
        return self._operation.label

    def is_completed(self) -> bool:
        """As late as can be: a poll or two after it is true."""
        if self._operation.done and self._polls:
            self._polls -= 1
            return False
        return self._operation.done

    def wait(self, timeout: float | None = None) -> None:
        """Raises DeviceError where it does not end, InFlightError where its memory was written meanwhile."""
        if timeout is not None:
            _extension.note("wait(timeout)")
        self.end(HANG_SECONDS if timeout is None else min(timeout, HANG_SECONDS))

    def end(self, seconds: float) -> None:
        if id(self) not in self._group.undelivered:
            return
        if not wait_until(lambda: self._operation.done, seconds):
            raise DeviceError(self._group.what_hangs(self._operation, seconds))
        del self._group.undelivered[id(self)]
        flight, deliver, self._deliver = self._flight, self._deliver, None
        if self._operation.error is not None:
            raise self._operation.error
        written = flight.check()
        flight.end()
        if written:
            raise InFlightError(f"second: the {written} of {self.label} was written while it was in flight")
        deliver()


class Group:
    """This rank's end of a communicator; the C++ half calls it, with torch's own ProcessGroup before that."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        store.set(f"second/{rank}", wire().address)
        self._addresses = [store.get(f"second/{other}").decode() for other in range(size)]
        if rank == 0:
            store.set("second/name", f"{os.getpid()}-{id(self)}")
        self._name = store.get("second/name").decode()
        self._main = Queue("the communicator", self._addresses)
        self._pairs: dict[int, Queue] = {}
        self._numbers: dict[Any, int] = {}
        self._batch: list[tuple[str, Tensor, int, str]] | None = None
        self._closed: str | None = None
        self.calls = 0
        self.undelivered: dict[int, Work] = {}

    def set_timeout(self, seconds: float) -> None:
        pass

    # --- collectives

    def all_gather(self, output: Tensor, input: Tensor, later: bool) -> Work:
        self._check_pair("all_gather", output, input, 1, self.size)
        own = read(_cpu(input))

        def finish(others: list[bytes]) -> bytes:
            return b"".join(others)

        return self._collective("all_gather", _told(input), [own] * self.size, [input], [output], finish, later)

    def all_gather_list(self, outputs: list[list[Tensor]], inputs: list[Tensor], later: bool) -> Work:
        (targets,), (own,) = outputs, inputs
        self._check("all_gather", *targets, own)
        if any(target.numel() != own.numel() or target.dtype != own.dtype for target in targets):
            raise ValueError("Tensor list operands to scatter/gather must have the same size and dtype")
        sent = read(_cpu(own))

        def finish(others: list[bytes]) -> list[bytes]:
            return others

        return self._collective("all_gather (list)", _told(own), [sent] * self.size, [own], targets, finish, later)

    def all_reduce(self, tensors: list[Tensor], op: str, later: bool) -> Work:
        (tensor,) = tensors
        self._check("all_reduce", tensor)
        sent, dtype, count = read(_cpu(tensor)), tensor.dtype, tensor.numel()

        def finish(others: list[bytes]) -> bytes:
            rows = [_numbers(data, dtype) for data in others]
            chunk = -(-count // self.size)
            chunks = zip(*(row.split(chunk) for row in rows)) if count else ()
            return b"".join(read(_reduced(list(chunk), op, at)) for at, chunk in enumerate(chunks))

        signature = f"{op} of {_told(tensor)}"
        return self._collective("all_reduce", signature, [sent] * self.size, [tensor], [tensor], finish, later)

    def reduce(self, tensors: list[Tensor], op: str, root: int, later: bool) -> Work:
        (tensor,) = tensors
        self._check("reduce", tensor)
        sent, dtype = read(_cpu(tensor)), tensor.dtype
        at_root = self.rank == root

        def finish(others: list[bytes]) -> bytes | None:
            return read(_reduced([_numbers(data, dtype) for data in others], op, 0)) if at_root else None

        outgoing = [sent if rank == root else b"" for rank in range(self.size)]
        outputs = [tensor] if at_root else []
        return self._collective(
            "reduce", f"{op} of {_told(tensor)} to {root}", outgoing, [tensor], outputs, finish, later
        )

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str, later: bool) -> Work:
        self._check_pair("reduce_scatter", output, input, self.size, 1)
        sent, dtype, width = read(_cpu(input)), output.dtype, output.nbytes
        outgoing = [sent[rank * width : (rank + 1) * width] for rank in range(self.size)]

        def finish(others: list[bytes]) -> bytes:
            return read(_reduced([_numbers(data, dtype) for data in others], op, self.rank))

        return self._collective("reduce_scatter", f"{op} of {_told(input)}", outgoing, [input], [output], finish, later)

    def all_to_all(self, output: Tensor, input: Tensor, gets: list[int], gives: list[int], later: bool) -> Work:
        self._check("all_to_all", output, input)
        if output.dtype != input.dtype:
            raise ValueError("Tensors are not equal in data type")
        given, got = (_splits(tensor, splits, self.size) for tensor, splits in ((input, gives), (output, gets)))
        sent, at, outgoing = read(_cpu(input)), 0, []
        for size in given:
            outgoing.append(sent[at : at + size])
            at += size

        def finish(others: list[bytes]) -> bytes:
            for rank, (data, size) in enumerate(zip(others, got)):
                if len(data) != size:
                    numbers = f"rank {rank} sends {len(data)} bytes to rank {self.rank}, which takes {size}"
                    raise DeviceError(f"second: all_to_all: {numbers}")
            return b"".join(others)

        signature = str(input.dtype).removeprefix("torch.")
        return self._collective("all_to_all", signature, outgoing, [input], [output], finish, later)

    def broadcast(self, tensors: list[Tensor], root: int, later: bool) -> Work:
        (tensor,) = tensors
        self._check("broadcast", tensor)
        at_root = self.rank == root
        outgoing = [read(_cpu(tensor))] * self.size if at_root else [b""] * self.size
        inputs, outputs = ([tensor], []) if at_root else ([], [tensor])

        def finish(others: list[bytes]) -> bytes | None:
            return None if at_root else others[root]

        signature = f"{_told(tensor)} from {root}"
        return self._collective("broadcast", signature, outgoing, inputs, outputs, finish, later)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], root: int, later: bool) -> Work:
        (own,), targets = inputs, outputs[0] if self.rank == root else []
        self._check("gather", own, *targets)
        sent = read(_cpu(own))
        outgoing = [sent if rank == root else b"" for rank in range(self.size)]

        def finish(others: list[bytes]) -> list[bytes]:
            return others

        return self._collective("gather", f"{_told(own)} to {root}", outgoing, [own], targets, finish, later)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], root: int, later: bool) -> Work:
        (own,), sources = outputs, inputs[0] if self.rank == root else []
        self._check("scatter", own, *sources)
        outgoing = [read(_cpu(source)) for source in sources] or [b""] * self.size

        def finish(others: list[bytes]) -> bytes:
            return others[root]

        return self._collective("scatter", f"{_told(own)} from {root}", outgoing, sources, [own], finish, later)

    def barrier(self, later: bool) -> Work:
        _extension.note("barrier")
        return self._collective("barrier", "", [b""] * self.size, [], [], lambda others: None, later)

    def _collective(
        self,
        kind: str,
        signature: str,
        outgoing: list[bytes],
        inputs: list[Tensor],
        outputs: list[Tensor],
        finish: Callable[[list[bytes]], Any],
        later: bool,
    ) -> Work:
        self._check_open(kind)
        number = self._next("collective")
        label = f"{kind}({signature}) number {number} of its group, asked for by {_site()}"
        told = (kind, signature, label)
        peers = [rank for rank in range(self.size) if rank != self.rank]
        name = (self._name, number)
        parts = [Part(rank, (*name, self.rank, rank), told, outgoing[rank], (*name, rank, self.rank)) for rank in peers]
        found: list[Any] = []

        def ended(messages: list[Message]) -> None:
            told_by = [told] * self.size
            others = [outgoing[self.rank]] * self.size
            for part, message in zip(parts, messages):
                told_by[part.rank], others[part.rank] = message
            if any(other[:2] != told[:2] for other in told_by):
                raise DeviceError(_disagreement(told_by))
            found.append(finish(others))

        views = [_cpu(tensor) for tensor in outputs]

        def deliver() -> None:
            data = found.pop()
            for view, one in zip(views, data if isinstance(data, list) else [data]):
                write(view, one)

        operation = Operation(label, parts, ended)
        work = Work(self, operation, Flight([_cpu(tensor) for tensor in inputs], views), deliver)
        self._main.put(operation)
        if not later:  # it runs on the stream of the caller: what comes next there comes after it
            work.end(HANG_SECONDS)
        return work

    # --- sends and receives

    def send(self, tensors: list[Tensor], peer: int) -> Work | None:
        return self._transfer("send", tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int) -> Work | None:
        return self._transfer("recv", tensors, peer)

    def start_coalescing(self) -> None:
        self._batch = []

    def end_coalescing(self) -> Work:
        batch, self._batch = self._batch, None
        parts, ends, flights = [], [], ([], [])
        label = f"a batch of {', '.join(f'{kind} with {peer}' for kind, _, peer, _ in batch)}, asked for by {_site()}"
        for kind, tensor, peer, site in batch:
            number = self._next(("batch", kind, peer))
            names = ("batch", min(self.rank, peer), max(self.rank, peer))
            part, end = self._part(kind, tensor, peer, (*names, self.rank if kind == "send" else peer, number), site)
            parts.append(part)
            ends.append(end)
            flights[kind == "recv"].append(_cpu(tensor))
        found: list[Callable[[], None]] = []
        operation = Operation(
            label, parts, lambda messages: found.extend(end(message) for end, message in zip(ends, messages))
        )
        work = Work(self, operation, Flight(*flights), lambda: [one() for one in found])
        self._main.put(operation)
        return work

    def _transfer(self, kind: str, tensors: list[Tensor], peer: int) -> Work | None:
        (tensor,) = tensors
        self._check_open(kind)
        self._check(kind, tensor)
        if self._batch is not None:
            self._batch.append((kind, tensor, peer, _site()))
            return None
        queue = self._pairs.get(peer)
        if queue is None:
            queue = self._pairs[peer] = Queue(f"the pair with rank {peer}", self._addresses)
        number = self._next(("pair", peer))
        part, end = self._part(kind, tensor, peer, ("pair", number), _site())
        found: list[Callable[[], None]] = []
        operation = Operation(part.value[3], [part], lambda messages: found.append(end(messages[0])))
        flight = Flight([_cpu(tensor)], []) if kind == "send" else Flight([], [_cpu(tensor)])
        work = Work(self, operation, flight, lambda: found.pop()())
        queue.put(operation)
        return work

    def _part(
        self, kind: str, tensor: Tensor, peer: int, names: tuple, site: str
    ) -> tuple[Part, Callable[[Message], Callable[[], None]]]:
        """What one send or receive tells its peer, and what makes a delivery of the answer."""
        view, size = _cpu(tensor), _told(tensor)
        label = f"{kind}({size}) {'to' if kind == 'send' else 'from'} rank {peer}, asked for by {site}"
        mine = (kind, size, self.rank, label)
        payload = read(view) if kind == "send" else b""
        part = Part(peer, (self._name, *names, self.rank, peer), mine, payload, (self._name, *names, peer, self.rank))

        def end(message: Message) -> Callable[[], None]:
            theirs = message.value
            if theirs[0] == kind:
                raise DeviceError(f"second: a deadlock on NCCL, where both wait for the other\n{_both(mine, theirs)}")
            if theirs[1] != size:
                raise DeviceError(f"second: what is sent is not what is received\n{_both(mine, theirs)}")
            return partial(write, view, message.payload) if kind == "recv" else lambda: None

        return part, end

    # --- the end

    def abort(self) -> None:
        self._close("aborted")
        for queue in (self._main, *self._pairs.values()):
            queue.fail(DeviceError("second: NCCL communicator was aborted on this rank"))
            queue.close()

    def shutdown(self) -> None:
        """Waits for what is pending; after `HANG_SECONDS` raises DeviceError where NCCL would go on waiting."""
        if self._closed:
            return
        queues = (self._main, *self._pairs.values())
        ended = wait_until(lambda: not any(queue.pending for queue in queues), HANG_SECONDS)
        pending = [entry.label for queue in queues for entry in queue.pending]
        self.abort()
        self._closed = "destroyed"
        if not ended:
            raise DeviceError("second: to destroy a group hangs while something is pending:\n  " + "\n  ".join(pending))

    def _close(self, how: str) -> None:
        self._closed = self._closed or how
        if self in groups:
            groups.remove(self)

    def what_hangs(self, operation: Operation, seconds: float) -> str:
        with changed:
            queue = next((q for q in (self._main, *self._pairs.values()) if operation in q.pending), self._main)
            first = queue.pending[0] if queue.pending else operation
            lines = [f"second: rank {self.rank} of {self.size} waited {seconds:g} s for {operation.label}"]
            if first is not operation:
                lines.append(f"  before it in its queue  {first.label}")
            lines.append(f"  not there  rank {', '.join(map(str, first.waits_for))}")
            lines += [f"  done before  {label}" for label in queue.ended]
        return "\n".join(lines)

    # --- checks

    def _next(self, what: Any) -> int:
        number = self._numbers.get(what, 0)
        self._numbers[what] = number + 1
        self.calls += 1
        return number

    def _check_open(self, kind: str) -> None:
        if self._closed:
            raise DeviceError(f"second: {kind} on a group that was {self._closed}, asked for by {_site()}")

    def _check(self, kind: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type != "second":
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type} ({kind})")
            if not tensor.is_contiguous():
                raise ValueError(f"Tensors must be contiguous ({kind}, shape {list(tensor.shape)}, {tensor.stride()})")
            if tensor.dtype not in DTYPES:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")

    def _check_pair(self, kind: str, output: Tensor, input: Tensor, outputs: int, inputs: int) -> None:
        self._check(kind, output, input)
        if output.dtype != input.dtype:
            raise TypeError(f"{kind}: output tensor must have the same type as input tensor")
        if output.numel() * outputs != input.numel() * inputs:
            raise ValueError(f"{kind}: output of {output.numel()}, input of {input.numel()}, {self.size} ranks")


def check_at_rest() -> None:
    """Raises DeviceError where something was started, in any group of this process, and never waited for."""
    left = [work.label for group in groups for work in group.undelivered.values()]
    if left:
        raise DeviceError("second: started, and never waited for:\n  " + "\n  ".join(left))


def forget_undelivered() -> None:
    for group in groups:
        group.undelivered.clear()


def _cpu(tensor: Tensor) -> Tensor:
    return _extension.on_cpu(tensor)


def _numbers(data: bytes, dtype: torch.dtype) -> Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _reduced(rows: list[Tensor], op: str, chunk: int) -> Tensor:
    """The reduction of one chunk, in the order of a ring: it begins at the rank after the chunk's."""
    combine, count = _REDUCE[op], len(rows)
    order = [rows[(chunk + 1 + step) % count] for step in range(count)]
    total = order[0].clone()
    for row in order[1:]:
        total = combine(total, row)
    return total / count if op == "avg" else total.to(order[0].dtype)


def _splits(tensor: Tensor, splits: list[int], size: int) -> list[int]:
    """Bytes per rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"Tensor's dim 0 does not divide equally across group size: {rows} by {size}")
        splits = [rows // size] * size
    elif sum(splits) != rows:
        raise ValueError(f"Split sizes doesn't match total dim 0 size: {splits}, {rows}")
    width = tensor.nbytes // rows if rows else 0
    return [split * width for split in splits]


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]"


def _site() -> str:
    return _asker(sys._getframe(2))


def _disagreement(told_by: list[tuple[str, str, str]]) -> str:
    lines = [f"  rank {rank}  {told[2]}" for rank, told in enumerate(told_by)]
    return "\n".join(["second: the ranks of a group are in different collectives", *lines])


def _both(mine: tuple, theirs: tuple) -> str:
    first, second = sorted((mine, theirs), key=lambda told: told[2])
    return f"  rank {first[2]}  {first[3]}\n  rank {second[2]}  {second[3]}"
