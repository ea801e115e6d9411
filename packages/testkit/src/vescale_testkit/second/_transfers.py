"""Sends and receives of the second device: without tags, and each ends when its other end was reached."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ._communicator import Communicator, asked_by
from ._memory import Flight, read, write
from ._numbers import check, on_host, told
from ._queue import DeviceError, Operation, Part, Queue
from ._wire import Message
from ._work import Work


class Transfers(Communicator):
    """Alone, on one queue per pair of ranks; those of a batch together, on the communicator's."""

    def send(self, tensors: list[Tensor], peer: int) -> Work | None:
        return self._transfer("send", tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int) -> Work | None:
        return self._transfer("recv", tensors, peer)

    def start_coalescing(self) -> None:
        self._batch = []

    def end_coalescing(self) -> Work:
        batch, self._batch = self._batch, None
        parts, ends, flights = [], [], ([], [])
        those = ", ".join(f"{kind} with {peer}" for kind, _, peer, _ in batch)
        label = f"a batch of {those}, asked for by {asked_by()}"
        for kind, tensor, peer, site in batch:
            number = self._next(("batch", kind, peer))
            names = ("batch", min(self.rank, peer), max(self.rank, peer))
            part, end = self._part(kind, tensor, peer, (*names, self.rank if kind == "send" else peer, number), site)
            parts.append(part)
            ends.append(end)
            flights[kind == "recv"].append(on_host(tensor))
        found: list[Callable[[], None]] = []
        operation = Operation(
            label, parts, lambda messages: found.extend(end(message) for end, message in zip(ends, messages))
        )
        work = self._started(operation, Flight(*flights), lambda: [one() for one in found])
        self._main.put(operation)
        return work

    def _transfer(self, kind: str, tensors: list[Tensor], peer: int) -> Work | None:
        (tensor,) = tensors
        self._check_open(kind)
        check(kind, tensor)
        if self._batch is not None:
            self._batch.append((kind, tensor, peer, asked_by()))
            return None
        queue = self._pairs.get(peer)
        if queue is None:
            queue = self._pairs[peer] = Queue(f"the pair with rank {peer}", self._addresses)
        number = self._next(("pair", peer))
        part, end = self._part(kind, tensor, peer, ("pair", number), asked_by())
        found: list[Callable[[], None]] = []
        operation = Operation(part.value[3], [part], lambda messages: found.append(end(messages[0])))
        flight = Flight([on_host(tensor)], []) if kind == "send" else Flight([], [on_host(tensor)])
        work = self._started(operation, flight, lambda: found.pop()())
        queue.put(operation)
        return work

    def _part(
        self, kind: str, tensor: Tensor, peer: int, names: tuple, site: str
    ) -> tuple[Part, Callable[[Message], Callable[[], None]]]:
        """Returns a send's or receive's message to its peer, and what makes a delivery of the answer."""
        view, size = on_host(tensor), told(tensor)
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


def _both(mine: tuple, theirs: tuple) -> str:
    first, second = sorted((mine, theirs), key=lambda told: told[2])
    return f"  rank {first[2]}  {first[3]}\n  rank {second[2]}  {second[3]}"
