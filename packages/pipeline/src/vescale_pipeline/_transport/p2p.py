"""Transfers between the ranks of one pipeline: tagged, posted early, bounded, into buffers that are used again.

A message is a few tensors. Both ends know from the schedule that it comes; what its
tensors look like is told once per kind of message (the header), and then remembered.
Transfers are posted and run beside the computation. On gloo a message is found by its
tag, so that receives may be posted ahead of their turn. Elsewhere (NCCL) messages of a
pair of ranks match in the order in which both post them, in both directions, and a wait
is the stream's, never the host's: Python values then travel through the store (`words.py`).

When anything fails on a rank, it closes its connections: every rank that waits for it
wakes at once, and finds the first cause in the store.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch_private import _abort_process_group, _storage_Use_Count
from .messages import UNUSED_TAG, Message, Recorder, Tags
from .staged import Staged, directly, wire_of
from .words import LinkError, Words


class Part(NamedTuple):
    """A header's entry for one tensor; `form` is the codec's, for more than a plain tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    form: Any = None


def part_of(tensor: Tensor, form: Any = None) -> Part:
    """Returns the header's entry for a plain tensor. A tensor with gaps arrives without them, any other with its
    strides: a kernel may add in another order where they differ."""
    stride = tuple(tensor.stride()) if _is_dense(tensor) else tuple(tensor.contiguous().stride())
    return Part(tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad, form)


def header_of(tensors: Sequence[Tensor | None], forms: Sequence[Any], before: Header | None) -> Header:
    """Returns the header of a message: `before`, that of the one before it, if that says the same; then nothing is
    made."""
    if before is not None and len(before) == len(tensors):
        for part, tensor, form in zip(before, tensors, forms):
            if part is None or tensor is None:
                if part is not tensor:
                    break
                continue
            shape, stride, dtype, requires_grad, told = part
            if not (
                tensor.shape == shape
                and tensor.stride() == stride
                and tensor.dtype is dtype
                and tensor.requires_grad is requires_grad
                and form == told
            ):
                break
        else:
            return before
    return tuple(None if tensor is None else part_of(tensor, form) for tensor, form in zip(tensors, forms))


def _is_dense(tensor: Tensor) -> bool:
    """True if its elements fill one stretch of memory."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: Tensor) -> Tensor:
    """Its memory, as one contiguous dim."""
    if tensor.is_contiguous():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,)) if _is_dense(tensor) else tensor.contiguous()


Header = tuple[Part | None, ...]


class Arrival:
    """A message that was posted to be received."""

    __slots__ = ("header", "tensors", "_link", "_works")

    def __init__(self, header: Header, tensors: list[Tensor | None], works: list, link: Link) -> None:
        self.header, self.tensors, self._works, self._link = header, tensors, works, link

    def wait(self) -> list[Tensor | None]:
        works, self._works = self._works, []
        wait = self._link.wait
        while works:
            wait(*works.pop(0))
        return self.tensors


class Link:
    """Messages to and from the other ranks of a pipeline.

    Arguments:
        ranks: the pipeline's global ranks, in order; `peer` below is a place among them.
        timeout: of every wait of the host.
        store, name: of the ranks' world, and of the pipeline in it.
        tags: what messages are called.
        failed: whether the pipeline is known to have failed.
        recorder: is told of every transfer.
    """

    def __init__(
        self,
        ranks: list[int],
        device: torch.device,
        timeout: timedelta,
        group: Any,
        store: Any,
        name: str,
        tags: Tags,
        failed: Callable[[], bool] = lambda: False,
        recorder: Recorder | None = None,
    ) -> None:
        self.ranks, self.device, self.timeout = ranks, device, timeout
        self.rank = ranks.index(dist.get_rank())
        has_tags = device.type == "cpu" or len(ranks) == 1
        self._words = None if has_tags else Words(store, name, ranks, self.rank, timeout, failed)
        self._group = group
        self._wire = wire = wire_of(group, device, timeout)
        self._to, self._from = directly(wire.send), directly(wire.recv)
        self._tags, self._recorder = tags, recorder or Recorder()
        self.calls = self.backwards = 0  # of the model, by this rank
        self._sent: list[tuple[Any, int, Any, Tensor, int | None]] = []
        self._free: dict[tuple, list[Tensor]] = {}

    def send(self, peer: int, tag: int, tensors: list[Tensor | None], until: int | None = None) -> None:
        """Posts a message; `flush` waits for all. `until`: the place among the peer's actions of that which takes it.

        Its tensors are kept until it has gone: to `flush`, or to `drop_sent`.
        """
        for tensor in tensors:
            if tensor is not None:
                tensor = tensor.detach()
                if not tensor.is_contiguous():
                    tensor = _flat(tensor)
                mark = self._posted(self.rank, peer, tag, 0)
                self._sent.append((self._started(self._to, tensor, peer, tag), peer, mark, tensor, until))
            tag += 1

    def post(self, peer: int, tag: int, header: Header) -> Arrival:
        """Posts a receive of a message."""
        tensors: list[Tensor | None] = []
        works = []
        for part in header:
            tensor = None
            if part is not None:
                tensor = self._buffer(part)
                into = tensor if tensor.is_contiguous() else _flat(tensor)
                mark = self._posted(peer, self.rank, tag, tensor.nbytes)
                works.append((self._started(self._from, into, peer, tag), peer, mark))
            tensors.append(tensor)
            tag += 1
        return Arrival(header, tensors, works, self)

    @property
    def _is_hosts(self) -> bool:
        """True if the connections are gloo's, whatever travels."""
        return self._words is None or isinstance(self._wire, Staged)

    @property
    def has_tags(self) -> bool:
        """True if messages are found by their tags, and not by the order in which a pair of ranks posts them."""
        return self._words is None

    def handed_over(self, kind: str, stage: int, tensors: list[Tensor | None], header: Header) -> None:
        """Is told what a stage takes from its neighbour on this rank, without a message."""

    def swap(self, peer: int, tag: int, tensors: list[Tensor | None], header: Header) -> Arrival:
        """A message each way. The lower rank sends first: the two post in one order, whatever the transport buffers."""
        if self.rank < peer:
            self.send(peer, tag, tensors)
            return self.post(peer, tag, header)
        arrival = self.post(peer, tag, header)
        self.send(peer, tag, tensors)
        return arrival

    def send_object(self, peer: int, tag: int, value: Any) -> None:
        """A small Python value: two messages where there are tags, else an entry in the store."""
        data = pickle.dumps(value)
        if self._words is not None:
            _, mark = self._posted(self.rank, peer, tag, 0, False)
            self._words.send(peer, tag, data)
            return self._recorder.ended(mark)
        self.send(peer, tag, [torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)])

    def receive_object(self, peer: int, tag: int) -> Any:
        """Waits for the object that `send_object` sent."""
        if self._words is not None:
            message, mark = self._posted(peer, self.rank, tag, 0, False)
            self._recorder.waits(mark)
            try:
                data = self._words.receive(peer, tag)
            except LinkError as error:
                self._recorder.failed(mark)
                raise LinkError(f"{error}, of {message}") from None
            self._recorder.ended(mark)
            return pickle.loads(data)
        size = self._receive(peer, tag, torch.empty(1, dtype=torch.int64))
        return pickle.loads(bytes(self._receive(peer, tag + 1, torch.empty(int(size), dtype=torch.uint8)).numpy()))

    def exchange(self, peers: list[int], tag: int, value: list[int]) -> list[list[int]]:
        """Sends the same few numbers to each peer, and gives theirs."""
        if self._words is not None:
            for peer in peers:
                self.send_object(peer, tag, value)
            return [self.receive_object(peer, tag) for peer in peers]
        mine = torch.tensor(value)
        arrivals = [self.swap(peer, tag, [mine], (part_of(mine),)) for peer in peers]
        return [arrival.wait()[0].tolist() for arrival in arrivals]

    def drop_sent(self, peer: int, place: int) -> None:
        """Drops sent messages that the peer took up to that place among its actions: something from there, or from
        later, has arrived."""
        sent, self._sent = self._sent, []
        for one in sent:
            work, to, mark, _, until = one
            if to == peer and until is not None and until <= place:
                self.wait(work, to, mark)
            else:
                self._sent.append(one)

    def flush(self) -> None:
        """Waits for all sends."""
        sent, self._sent = self._sent, []
        while sent:
            self.wait(*sent.pop()[:3])

    def wait(self, work: Any, peer: int, posted: tuple[Message, Any]) -> None:
        """Waits for one transfer with `peer`; without tags, lets the stream wait. Raises LinkError, which names it."""
        message, mark = posted
        self._recorder.waits(mark)
        try:
            if self._words is None:
                work.wait(self.timeout)
            else:
                work.wait()  # with a timeout the host would block
            return self._recorder.ended(mark)
        except RuntimeError as error:
            text = _text(error)
        self._recorder.failed(mark)
        del work  # this frame lives as long as the error, and must not hold a connection
        raise LinkError(f"rank {self.ranks[peer]}: {text}, of {message}")

    def recycle(self, tensor: Tensor) -> None:
        """Gives a receive buffer back; one that somebody still looks at is left to them.

        What a stage hands to its neighbour on this rank comes back as well, with the graph that made it: of that what
        is received next must not be a part.
        """
        if _storage_Use_Count(tensor.untyped_storage()._cdata) <= 2:  # `tensor`, and the handle just made
            self._free.setdefault((tensor.shape, tensor.stride(), tensor.dtype), []).append(tensor.detach())

    def close(self) -> None:
        """Ends all connections: whoever waits for this rank wakes. Safe to call twice."""
        self._sent.clear()
        self._free.clear()
        is_hosts = self._is_hosts
        group, self._group = self._group, None
        self._wire = self._to = self._from = None
        if group is None or not dist.is_initialized():
            return
        if is_hosts:
            dist.destroy_process_group(group)
        else:
            _abort_process_group(group)  # to destroy it waits for what is in flight

    def wake(self) -> None:
        """Wakes, from another thread, whoever waits here for a transfer: with an error. The connections are closed
        later."""
        group, wire = self._group, self._wire
        if group is None or not dist.is_initialized():
            return
        if not self._is_hosts:
            group.abort()
            return
        wire = wire.wire if isinstance(wire, Staged) else wire
        # Gloo has no abort; a wait that takes too long closes all pairs of its context.
        peer = (self.rank + 1) % len(self.ranks)
        with contextlib.suppress(RuntimeError):
            wire.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))

    def _receive(self, peer: int, tag: int, into: Tensor) -> Tensor:
        mark = self._posted(peer, self.rank, tag, into.nbytes)
        self.wait(self._started(self._from, into, peer, tag), peer, mark)
        return into

    def _posted(self, source: int, target: int, tag: int, received: int, is_ordered: bool = True) -> tuple:
        """A transfer between two places of the pipeline, and the recorder's mark for it."""
        message = Message(self._tags, self.calls, self.ranks[source], self.ranks[target], tag)
        return message, self._recorder.begin(message, is_ordered and self._words is not None, received)

    def _started(self, transfer: Callable, tensor: Tensor, peer: int, tag: int) -> Any:
        try:
            return transfer([tensor], peer, tag)
        except RuntimeError as error:
            text = _text(error)
        raise LinkError(f"rank {self.ranks[peer]}: {text}")

    def _buffer(self, part: Part) -> Tensor:
        free = self._free.get((part.shape, part.stride, part.dtype))
        if free:
            return free.pop()
        return torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device=self.device)


def _text(error: RuntimeError) -> str:
    """Returns gloo's message, without its source lines and advice."""
    text = str(error).partition("] ")[2] or str(error)
    return text.split(". This is typically")[0].splitlines()[0]
