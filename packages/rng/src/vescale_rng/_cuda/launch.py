"""Maps each element's place to the thread of one CUDA device that makes it, and to the call. Pure arithmetic.

torch fills a tensor on CUDA by launches whose grid follows from the device (ATen/native/cuda/DistributionTemplates.h,
calc_execution_policy and distribution_nullary_kernel; Dropout.cu): blocks of 256 threads, at most as many as the
device holds at once. Thread t's call c is the Philox block of key `seed` and counter (offset / 4 + c, t), four words
of 32 bits. Place i of a launch of T threads is

    fills            thread i % T;  k = i // T: call k // lanes, lane k % lanes; a call gives 4 numbers, or 2 wide ones
    fused dropout    V elements at once, V the most of 16 bytes that divides the count: thread (i // V) % T, call
                     (i // V // T) * max(1, V // 4) + i % V // 4, lane i % V % 4; of V = 1, as a fill

and afterwards the offset is 4 * ((n - 1) // (T * lanes) + 1) on. A fill of 2 GiB or more is halved until each part is
less, first halves first, each a launch of its own; the offset of the undivided is gone past at every call. (Of V = 2 a
call's upper lanes are never used, and the offset is moved by less than the calls: so does torch.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
_LEAST = (1 << 31) - 1  # what 32 bits of index hold


@dataclass(frozen=True)
class Geometry:
    """The geometry of a device: its multiprocessors, and the threads that each of them holds at once."""

    multiprocessors: int
    threads: int = 2048

    @classmethod
    def of(cls, device: torch.device) -> Geometry:
        """Returns the geometry of a CUDA device of this machine."""
        found = torch.cuda.get_device_properties(device)
        return cls(found.multi_processor_count, found.max_threads_per_multi_processor)

    def launched(self, count: int) -> int:
        """Threads of a launch over `count` elements."""
        return min(self.multiprocessors * (self.threads // BLOCK), -(-count // BLOCK)) * BLOCK


@dataclass(frozen=True)
class Launch:
    """Places [start, start + count) of a tensor, made by `threads` threads whose counters begin at `counter`."""

    start: int
    count: int
    threads: int
    counter: int
    lanes: int = 4
    vector: int = 1

    def made_by(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns, for places of the tensor, int64: the thread, the counter of its call, and the lane."""
        at = places - self.start
        if self.vector > 1:
            group, lane = at // self.vector, at % self.vector
            calls = max(1, self.vector // 4)
            return group % self.threads, self.counter + group // self.threads * calls + lane // 4, lane % 4
        turn = at // self.threads
        return at % self.threads, self.counter + turn // self.lanes, turn % self.lanes


def fills(count: int, itemsize: int, lanes: int, geometry: Geometry, offset: int) -> tuple[list[Launch], int]:
    """The launches that fill `count` elements without gaps, from a generator's `offset`; and its offset after them."""
    found = []
    if not _is_short(count, itemsize):
        offset += _advance(count, lanes, geometry)
    for start, size in _parts(0, count, itemsize):
        found.append(Launch(start, size, geometry.launched(size), offset // 4, lanes))
        offset += _advance(size, lanes, geometry)
    return found, offset


def dropout(count: int, itemsize: int, geometry: Geometry, offset: int) -> tuple[list[Launch], int]:
    """Likewise of the fused dropout kernel, whose input has no gaps and begins at 16 bytes: one launch, at any size."""
    if not count:
        return [], offset
    vector = 16 // itemsize
    while count % vector:
        vector //= 2
    launch = Launch(0, count, geometry.launched(count), offset // 4, 4, vector)
    return [launch], offset + _advance(count, 4, geometry)


def _advance(count: int, lanes: int, geometry: Geometry) -> int:
    return ((count - 1) // (geometry.launched(count) * lanes) + 1) * 4


def _is_short(count: int, itemsize: int) -> bool:
    return count <= _LEAST and 1 + (count - 1) * itemsize <= _LEAST


def _parts(start: int, count: int, itemsize: int) -> Iterator[tuple[int, int]]:
    if not count:
        return
    if _is_short(count, itemsize):
        yield start, count
        return
    yield from _parts(start, count // 2, itemsize)
    yield from _parts(start + count // 2, count - count // 2, itemsize)
