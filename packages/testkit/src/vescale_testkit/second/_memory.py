"""Guards memory in flight: outputs hold poison until somebody waits, and nobody may write to any of it meanwhile.

On a GPU a collective reads its input and writes its output at some moment between its call and the wait for it. Here
it does so at the worst moment for everybody: what it sends is taken at the call, and must still be there at the wait;
what it received appears at the wait, and not before. A reader of an output in flight gets NaN, or numbers that no
index can be; a writer to an input or an output in flight is told so at the wait, with the line of the collective.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ._extension import extension


class InFlightError(RuntimeError):
    """Memory that belongs to a collective in flight was written."""


def read(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def write(tensor: Tensor, data: bytes) -> None:
    """Overwrites a contiguous tensor."""
    if data:
        ctypes.memmove(tensor.data_ptr(), data, len(data))


class Flight:
    """The memory of one collective in flight.

    Arguments:
        inputs: contiguous tensors that it reads.
        outputs: those that it writes; one may be an input as well, or hold one, or lie within one.
    """

    def __init__(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self._kept = [*inputs, *outputs]
        self._inputs, self._outputs = inputs, outputs
        extension().use("a collective", inputs, outputs)
        self._clock = extension().clock()
        self._watched: list[tuple[int, bytes, str]] = []
        written = [_span(tensor) for tensor in outputs if tensor.numel()]
        held = [_span(tensor) for tensor in inputs if tensor.numel()]
        in_place = {span for span in held if span in written}
        for tensor in outputs:
            if tensor.numel():
                first, end = _span(tensor)
                kept = [] if (first, end) in in_place else [span for span in held if span[0] < end and first < span[1]]
                _poison(tensor, kept)
        # Taken after the poison: an input that an output covers in part is what it is until the wait.
        for what, spans in (("output", written), ("input", held)):
            for first, end in dict.fromkeys(spans):
                self._watched.append((first, ctypes.string_at(first, end - first), what))

    def check(self) -> str | None:
        """Returns "input" or "output" if it was written meanwhile."""
        for first, before, what in self._watched:
            if ctypes.string_at(first, len(before)) != before:
                return what
        return None

    def end(self) -> None:
        """The stream of whoever waits comes after it."""
        extension().wait(self._clock)
        extension().use("a collective", self._inputs, self._outputs)
        self._kept = self._inputs = self._outputs = []
        self._watched = []


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _poison(tensor: Tensor, kept: list[tuple[int, int]]) -> None:
    """Overwrites the tensor, except for the stretches `kept`."""
    first, end = _span(tensor)
    pattern = _PATTERNS.get(tensor.dtype, b"\xa5" * tensor.element_size())
    for start, stop in sorted(kept):
        _fill(first, min(start, end), pattern)
        first = max(first, stop)
    _fill(first, end, pattern)


def _fill(first: int, end: int, pattern: bytes) -> None:
    if end > first:
        ctypes.memmove(first, pattern * ((end - first) // len(pattern)), end - first)


_PATTERNS = {
    # Signalling NaN: arithmetic makes quiet ones of them, so that it leaves a trace.
    torch.float64: (0x7FF4DEADDEADDEAD).to_bytes(8, "little"),
    torch.float32: (0x7FA0DEAD).to_bytes(4, "little"),
    torch.float16: (0x7D5A).to_bytes(2, "little"),
    torch.bfloat16: (0x7FA5).to_bytes(2, "little"),
    torch.int64: (-0x5EADDEADDEAD).to_bytes(8, "little", signed=True),
    torch.int32: (-0x5EADDEAD).to_bytes(4, "little", signed=True),
    torch.bool: b"\x01",
}
