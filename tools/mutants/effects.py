"""What stands in a place's stead while a training runs on this rank of the second device.

A `Survey` does what the place would do and notes whether that had any effect; a `Mutant` does it wrong. Both are
called as `grammar.changed` writes it: `helper(number, kind, function, *arguments)`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_testkit.second import _communicator, _memory, _numbers, _queue
from vescale_testkit.second._extension import extension

STEPS = 4
"""The trainings' steps, of which the last one's waits are counted."""


class HelperError(RuntimeError):
    """A helper failed, and no mutant was tried."""


class Helper:
    def __init__(self) -> None:
        self.step: int | None = None  # of the training, within it: set by whoever runs it
        self.is_odd = dist.get_rank() == 1  # what one rank alone does otherwise, this one does

    def __call__(self, number: int, kind: str, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self, kind)(number, *arguments, **keywords)


class Survey(Helper):
    """Notes which places do anything.

    Attributes:
        reached: how often each was.
        effects: of these, how often it did something that a mutant would not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reached: Counter[int] = Counter()
        self.effects: Counter[int] = Counter()
        self._copies: list[tuple[int, list[tuple[Tensor, int, int]]]] = []
        self._marks: dict[int, list[int]] = {}

    def wait(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        before = _undelivered()
        result = function(*arguments, **keywords)
        self._saw(number, _undelivered() < before)
        return result

    def write(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        before = _works()
        result = function(*arguments, **keywords)
        self._saw(number, any(_buffers(work) for key, work in _works().items() if key not in before))
        return result

    def skip(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        before = _calls()
        result = function(*arguments, **keywords)
        self._saw(number, self.is_odd and _calls() > before)
        return result

    tag = skip

    def test(self, number: int, value: Any) -> Any:
        self._saw(number, self.is_odd)
        return value

    def order(self, number: int, values: Iterable) -> Iterator:
        busy = 0
        for value in values:
            before = _calls()
            yield value
            busy += _calls() > before
        self._saw(number, self.is_odd and busy > 1)

    def swap(self, number: int) -> bool:
        self._marks[number] = [_calls()]
        return False

    def mark(self, number: int, count: int) -> None:
        marks = self._marks.get(number, [])
        marks.append(_calls())
        if count == 2 and len(marks) == 3:
            self._saw(number, self.is_odd and marks[0] < marks[1] < marks[2])

    def item(self, number: int, value: Any) -> Any:
        with torch._C.DisableTorchFunction():
            self._saw(number, self.step == STEPS and _is_on_device(value))
        return value

    def host(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        with torch._C.DisableTorchFunction():
            self._saw(number, _is_on_device(result) and result.dim() > 0)
        return result

    def clone(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        source = _self_of(function, arguments)
        result = function(*arguments, **keywords)
        with torch._C.DisableTorchFunction():
            if not (type(source) is Tensor and type(result) is Tensor and _is_on_device(result)):
                self._saw(number, False)
            elif source is result or result.is_contiguous() != source.is_contiguous():
                self._saw(number, source is not result)
            else:
                self._saw(number, False)  # until somebody is seen to write to one of the two
                self._copies.append((number, [(one, one._version, _bits(one)) for one in (source, result)]))
        return result

    def stream(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        stream = getattr(function, "__self__", None)
        before = _come_after(stream)
        result = function(*arguments, **keywords)
        self._saw(number, before is None or _come_after(stream) != before)
        return result

    def finish(self) -> None:
        """What was copied and written later, on either side, needed the copy."""
        with torch._C.DisableTorchFunction():
            for number, both in self._copies:
                self.effects[number] += any(v != one._version or bits != _bits(one) for one, v, bits in both)

    def _saw(self, number: int, effect: bool) -> None:
        self.reached[number] += 1
        self.effects[number] += effect


class Mutant(Helper):
    """Does it wrong, on every visit.

    Arguments:
        which: of several ways to do it wrong, by its remainder.
    """

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which, self.visits = which, 0
        self._held: list[tuple[Callable, tuple, dict]] = []

    def __call__(self, number: int, kind: str, *arguments: Any, **keywords: Any) -> Any:
        self.visits += 1
        return super().__call__(number, kind, *arguments, **keywords)

    def wait(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        waiter = getattr(function, "__self__", None)
        return next((vars(waiter)[n] for n in ("_out", "_buffer", "tensors") if n in getattr(waiter, "__dict__", {})),
                    getattr(waiter, "tensors", None))  # fmt: skip

    def write(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        before = _works()
        result = function(*arguments, **keywords)
        for key, work in _works().items():
            buffers = _buffers(work) if key not in before else []
            if buffers:
                _overwrite(buffers[self.which % len(buffers)])
        return result

    def skip(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        return None if self.is_odd else function(*arguments, **keywords)

    def tag(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> None:
        """Two by two, on one rank, the second first."""
        if not self.is_odd:
            function(*arguments, **keywords)
        elif self._held:
            function(*arguments, **keywords)
            held, more, named = self._held.pop()
            held(*more, **named)
        else:
            self._held.append((function, arguments, keywords))

    def test(self, number: int, value: Any) -> Any:
        return not value if self.is_odd else value

    def order(self, number: int, values: Iterable) -> Iterable:
        values = list(values)
        return values[::-1] if self.is_odd else values

    def swap(self, number: int) -> bool:
        return self.is_odd

    def mark(self, number: int, count: int) -> None:
        pass

    def item(self, number: int, value: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if _is_on_device(value):
                value.detach().reshape(-1)[0].item()
        return value

    def host(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        with torch._C.DisableTorchFunction():
            return result.detach().cpu() if _is_on_device(result) else result

    def clone(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        return _self_of(function, arguments)


    def stream(self, number: int, function: Callable, *arguments: Any, **keywords: Any) -> None:
        pass


class Traffic:
    """What this rank's communicators were given to do: digests of their operations, in order, with what was sent."""

    def __init__(self) -> None:
        self._queues: dict[int, Any] = {}
        self._put = _queue.Queue.put

    def __enter__(self) -> Traffic:
        def put(queue: Any, operation: Any) -> None:
            digest = self._queues.setdefault(id(queue), hashlib.blake2b(digest_size=8))
            digest.update(operation.label.partition(", asked for by")[0].encode())
            if not operation.label.startswith("broadcast(uint8"):  # objects: a folder's name is another each time
                for part in operation._parts:
                    digest.update(part.payload)
            self._put(queue, operation)

        _queue.Queue.put = put
        return self

    def __exit__(self, *error: object) -> None:
        _queue.Queue.put = self._put

    @property
    def digests(self) -> list[str]:
        """Of the communicators in the order of their first use."""
        return [digest.hexdigest() for digest in self._queues.values()]


def _come_after(stream: Any) -> list[int] | None:
    """What of the other streams this one comes after; None of what is no stream."""
    if not isinstance(stream, torch.Stream):
        return None
    with stream:
        clock = extension().clock()
    return [ticks for other, ticks in enumerate(clock) if other != stream.stream_id]


def _self_of(function: Callable, arguments: tuple) -> Any:
    """Whose method it is, within helpers of other kinds at the same place."""
    while isinstance(function, Helper):
        function, arguments = arguments[2], arguments[3:]
    return getattr(function, "__self__", None)


def _is_on_device(value: Any) -> bool:
    return type(value) is Tensor and value.device.type == "second" and value.numel() > 0 and not value.requires_grad


def _works() -> dict[int, Any]:
    return {key: work for group in _communicator.groups for key, work in group.undelivered.items()}


def _undelivered() -> int:
    return sum(len(group.undelivered) for group in _communicator.groups)


def _calls() -> int:
    return sum(group.calls for group in _communicator.groups)


def _buffers(work: Any) -> list[Tensor]:
    return [buffer for buffer in work._flight._kept if buffer.numel()]


def _overwrite(buffer: Tensor) -> None:
    """One element changes its bits."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        memory = buffer.view(-1)[:1].view(torch.uint8)
        memory.bitwise_xor_(torch.full_like(memory, 0x11))


def _bits(tensor: Tensor) -> int:
    return hash(_memory.read(_numbers.on_host(tensor.contiguous())))
