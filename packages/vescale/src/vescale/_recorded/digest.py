"""Digests a tensor for a record: the same numbers however it lies on a mesh. Pure.

    digest    a sum, modulo 2^64, over all elements of a hash of (global flat index, bits). Integers add exactly and
              in any order, so ranks hash what they hold and nobody gathers anything.
    sketch    every element is added, with a sign, to one of 16 sums; a hash of its index chooses both (Charikar,
              Chen, Farach-Colton, "Finding frequent items in data streams", 2002). Linear: the norm of the
              difference of two sketches estimates that of the difference of the two tensors, which norms alone do
              not tell (a permutation keeps them).
    norm, largest absolute value

The hash is the finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", 2014).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor.engine import Box

SKETCHES = 16
_CHUNK = 1 << 16  # elements hashed at once: the few arrays of 8 bytes each stay in a cache
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Summary:
    """Summary of a whole tensor, or of a part of one."""

    digest: int
    norm: float
    largest: float
    sketch: tuple[float, ...]

    @classmethod
    def of_numbers(cls, digest: int, numbers: Sequence[float]) -> Summary:
        """Builds a summary from the result of `measure`."""
        square, largest, *sketch = numbers
        return cls(digest % 2**64, math.sqrt(square), largest, tuple(sketch))

    @classmethod
    def of_parts(cls, parts: Sequence[Summary]) -> Summary:
        """Joins the summaries of parts that do not overlap."""
        largest = [part.largest for part in parts]
        return cls(
            sum(part.digest for part in parts) % 2**64,
            math.hypot(*(part.norm for part in parts)),
            math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0),
            tuple(map(math.fsum, zip(*(part.sketch for part in parts))))
            if all(math.isfinite(part.norm) for part in parts)
            else (math.nan,) * SKETCHES,
        )

    def distance(self, other: Summary) -> float:
        """Estimate of the norm of the difference over the larger norm; NaN where values are not finite."""
        if self.digest == other.digest:
            return 0.0
        apart, scale = math.dist(self.sketch, other.sketch), max(self.norm, other.norm)
        return apart / scale if scale else 0.0


def measure(local: Tensor, boxes: Sequence[Box], shape: Sequence[int]) -> Tensor:
    """Measures a plain tensor that holds `boxes` of a tensor of `shape`: int64 [3 + SKETCHES], for `unpack`.

    It stays on the tensor's device, so that nobody waits for it before `unpack`.
    """
    flat, width = _elements(local)
    digest = torch.zeros((), dtype=torch.int64, device=local.device)
    numbers = torch.zeros(2 + SKETCHES, dtype=torch.float64, device=local.device)
    for start, index in flat_indices(boxes, shape, width, local.device):
        held = flat[start : start + index.numel()]
        hashed = _scramble(index.add_(1).mul_(_GOLDEN))
        bits = held.view(_BITS[held.element_size()]).to(torch.int64)
        values = held.to(torch.float64)
        numbers[0] += values.dot(values)
        numbers[1] = torch.maximum(numbers[1], values.abs().max())
        signed = torch.where(hashed < 0, -values, values)
        numbers[2:] += torch.bincount(hashed & (SKETCHES - 1), signed, SKETCHES)
        digest += _scramble((bits * _ODD).add_(hashed)).sum()
    return torch.cat((digest.view(1), numbers.view(torch.int64)))


def unpack(measured: Sequence[Tensor]) -> list[Summary]:
    """The summaries, with one copy from each device."""
    found: list[Any] = [None] * len(measured)
    for device in {one.device for one in measured}:
        places = [place for place, one in enumerate(measured) if one.device == device]
        table = torch.stack([measured[place] for place in places]).cpu()
        digests, numbers = table[:, 0].tolist(), table[:, 1:].contiguous().view(torch.float64).tolist()
        for place, digest, row in zip(places, digests, numbers):
            found[place] = Summary.of_numbers(digest, row)
    return found


def flat_indices(
    boxes: Sequence[Box], shape: Sequence[int], width: int, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Yields chunks: where they begin in the flat local tensor, and the global flat index of each element, int64.

    width: numbers per element: two where it is complex.
    """
    shape = (*shape, width)
    for ranges, offset in boxes:
        sizes, corner = _joined((*ranges, (0, width)), shape)
        count = math.prod(size for size, _ in sizes)
        for start in range(0, count, _CHUNK):
            rest = torch.arange(start, min(start + _CHUNK, count), dtype=torch.int64, device=device)
            index = torch.full_like(rest, corner)
            for size, stride in reversed(sizes[1:]):
                index += (rest % size) * stride
                rest //= size
            yield offset * width + start, index.add_(rest, alpha=sizes[0][1])


def first_index(a: Tensor, b: Tensor, rtol: float) -> int | None:
    """The first flat index at which two plain tensors differ: in a bit, or by more than rtol of the larger norm's
    share per element."""
    (one, width), (other, _) = _elements(a), _elements(b)
    if rtol:
        x, y = one.to(torch.float64), other.to(torch.float64)
        share = torch.maximum(x.norm(), y.norm()) / math.sqrt(max(x.numel(), 1))
        differs = ~((x - y).abs() <= rtol * share)
    else:
        differs = one.view(_BITS[one.element_size()]) != other.view(_BITS[other.element_size()])
    found = differs.nonzero()
    return int(found[0]) // width if found.numel() else None


def hexadecimal(tensor: Tensor, index: int) -> str:
    """The bits of one element, and its value: `0x3f800000 (1.0)`."""
    flat, width = _elements(tensor)
    held = flat[index * width : (index + 1) * width]
    digits = 2 * held.element_size()
    bits = held.view(_BITS[held.element_size()]).tolist()
    words = " ".join(f"0x{word % 16**digits:0{digits}x}" for word in bits)
    return f"{words} ({tensor.reshape(-1)[index].item()})"


def _elements(tensor: Tensor) -> tuple[Tensor, int]:
    """Flat and real, and how many numbers make an element."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        return torch.view_as_real(tensor.contiguous()).reshape(-1), 2
    return tensor.contiguous().reshape(-1), 1


def _joined(ranges: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """Per dim (size of the box, stride in the whole), and the flat index of the box's corner; whole dims join."""
    sizes: list[tuple[int, int]] = []
    stride, corner, is_whole = 1, 0, False
    for (start, stop), size in zip(reversed(ranges), reversed(shape)):
        corner += start * stride
        if is_whole:
            inner, step = sizes[0]
            sizes[0] = (inner * (stop - start), step)
        else:
            sizes.insert(0, (stop - start, stride))
        is_whole = stop - start == size
        stride *= size
    return sizes, corner


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GOLDEN, _ODD = _signed(0x9E3779B97F4A7C15), _signed(0xD1342543DE82EF95)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def _scramble(words: Tensor) -> Tensor:
    """Scrambles in place. int64 stands for 64 bits: products wrap, and shifts are made logical."""
    for shift, factor in _ROUNDS:
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)
        if factor != 1:
            words *= factor
    return words
