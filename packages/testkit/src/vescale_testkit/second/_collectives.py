"""Collectives of the second device: the same on all ranks, in the same order, else an error that names both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import _work
from ._communicator import Communicator, asked_by
from ._extension import extension
from ._memory import Flight, read, write
from ._numbers import bytes_of_splits, check, check_pair, numbers_of, on_host, reduced, told
from ._queue import DeviceError, Operation, Part
from ._wire import Message
from ._work import Work


class Collectives(Communicator):
    """Each call returns what torch's backend waits for; `later` is its `async_op`."""

    def all_gather(self, output: Tensor, input: Tensor, later: bool) -> Work:
        check_pair("all_gather", output, input, 1, self.size, self.size)
        own = read(on_host(input))

        def finish(others: list[bytes]) -> bytes:
            return b"".join(others)

        return self._collective("all_gather", told(input), [own] * self.size, [input], [output], finish, later)

    def all_gather_list(self, outputs: list[list[Tensor]], inputs: list[Tensor], later: bool) -> Work:
        (targets,), (own,) = outputs, inputs
        check("all_gather", *targets, own)
        if any(target.numel() != own.numel() or target.dtype != own.dtype for target in targets):
            raise ValueError("Tensor list operands to scatter/gather must have the same size and dtype")
        sent = read(on_host(own))

        def finish(others: list[bytes]) -> list[bytes]:
            return others

        return self._collective("all_gather (list)", told(own), [sent] * self.size, [own], targets, finish, later)

    def all_reduce(self, tensors: list[Tensor], op: str, later: bool) -> Work:
        (tensor,) = tensors
        check("all_reduce", tensor)
        sent, dtype, count = read(on_host(tensor)), tensor.dtype, tensor.numel()

        def finish(others: list[bytes]) -> bytes:
            rows = [numbers_of(data, dtype) for data in others]
            chunk = -(-count // self.size)
            chunks = zip(*(row.split(chunk) for row in rows)) if count else ()
            return b"".join(read(reduced(list(chunk), op, at)) for at, chunk in enumerate(chunks))

        signature = f"{op} of {told(tensor)}"
        return self._collective("all_reduce", signature, [sent] * self.size, [tensor], [tensor], finish, later)

    def reduce(self, tensors: list[Tensor], op: str, root: int, later: bool) -> Work:
        (tensor,) = tensors
        check("reduce", tensor)
        sent, dtype = read(on_host(tensor)), tensor.dtype
        at_root = self.rank == root

        def finish(others: list[bytes]) -> bytes | None:
            return read(reduced([numbers_of(data, dtype) for data in others], op, 0)) if at_root else None

        outgoing = [sent if rank == root else b"" for rank in range(self.size)]
        outputs = [tensor] if at_root else []
        return self._collective(
            "reduce", f"{op} of {told(tensor)} to {root}", outgoing, [tensor], outputs, finish, later
        )

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str, later: bool) -> Work:
        check_pair("reduce_scatter", output, input, self.size, 1, self.size)
        sent, dtype, width = read(on_host(input)), output.dtype, output.nbytes
        outgoing = [sent[rank * width : (rank + 1) * width] for rank in range(self.size)]

        def finish(others: list[bytes]) -> bytes:
            return read(reduced([numbers_of(data, dtype) for data in others], op, self.rank))

        return self._collective("reduce_scatter", f"{op} of {told(input)}", outgoing, [input], [output], finish, later)

    def all_to_all(self, output: Tensor, input: Tensor, gets: list[int], gives: list[int], later: bool) -> Work:
        check("all_to_all", output, input)
        if output.dtype != input.dtype:
            raise ValueError("Tensors are not equal in data type")
        given, got = (bytes_of_splits(tensor, splits, self.size) for tensor, splits in ((input, gives), (output, gets)))
        sent, at, outgoing = read(on_host(input)), 0, []
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
        check("broadcast", tensor)
        at_root = self.rank == root
        outgoing = [read(on_host(tensor))] * self.size if at_root else [b""] * self.size
        inputs, outputs = ([tensor], []) if at_root else ([], [tensor])

        def finish(others: list[bytes]) -> bytes | None:
            return None if at_root else others[root]

        signature = f"{told(tensor)} from {root}"
        return self._collective("broadcast", signature, outgoing, inputs, outputs, finish, later)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], root: int, later: bool) -> Work:
        (own,), targets = inputs, outputs[0] if self.rank == root else []
        check("gather", own, *targets)
        sent = read(on_host(own))
        outgoing = [sent if rank == root else b"" for rank in range(self.size)]

        def finish(others: list[bytes]) -> list[bytes]:
            return others

        return self._collective("gather", f"{told(own)} to {root}", outgoing, [own], targets, finish, later)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], root: int, later: bool) -> Work:
        (own,), sources = outputs, inputs[0] if self.rank == root else []
        check("scatter", own, *sources)
        outgoing = [read(on_host(source)) for source in sources] or [b""] * self.size

        def finish(others: list[bytes]) -> bytes:
            return others[root]

        return self._collective("scatter", f"{told(own)} from {root}", outgoing, sources, [own], finish, later)

    def barrier(self, later: bool) -> Work:
        extension().note("barrier")
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
        label = f"{kind}({signature}) number {number} of its group, asked for by {asked_by()}"
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

        views = [on_host(tensor) for tensor in outputs]

        def deliver() -> None:
            data = found.pop()
            for view, one in zip(views, data if isinstance(data, list) else [data]):
                write(view, one)

        operation = Operation(label, parts, ended)
        work = self._started(operation, Flight([on_host(tensor) for tensor in inputs], views), deliver)
        self._main.put(operation)
        if not later:  # it runs on the stream of the caller: what comes next there comes after it
            work.end(_work.HANG_SECONDS)
        return work


def _disagreement(told_by: list[tuple[str, str, str]]) -> str:
    lines = [f"  rank {rank}  {told[2]}" for rank, told in enumerate(told_by)]
    return "\n".join(["second: the ranks of a group are in different collectives", *lines])
