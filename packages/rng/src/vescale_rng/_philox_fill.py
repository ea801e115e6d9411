"""The `philox` stream: what a shard holds is computed from the key of the draw and the places, at the shard's cost.

A draw takes its key, 128 bits, from torch's generator; element i of the global tensor,
row-major whatever its memory order, is then a function of the key and of i
(`_transforms`). On CPU numpy makes the words, row by row of the shard; elsewhere, and
where rows are too short for that, torch ops make them, two blocks per element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ._philox import Key, Runs, words_at
from ._region import Region
from ._transforms import is_wide, numbers

CHUNK = 1 << 18  # elements at a time: what a piece costs in Python is little beside it
SHORT = 32  # elements of a row, below which a run costs more than its parts


def fill_part(target: Tensor, region: Region, function: Callable, args: tuple, kwargs: dict, key: Key) -> None:
    """Overwrites `target`, which holds `region` of the global tensor, dims in the user's order."""
    if not target.numel():
        return
    out = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device=target.device)
    joined = region.joined()
    rows = out.view(-1, joined.shape[-1]) if joined.sizes else out.view(1, 1)
    offsets = _row_offsets(joined)
    dtype, wide = target.dtype, is_wide(function, target.dtype)
    runs, at = Runs(key), 0
    for start, stop in joined.ranges[-1] if joined.sizes else ((0, 1),):
        short = stop - start < SHORT and len(offsets) > 1
        scattered = target.device.type != "cpu" or short
        for first, last, row, end in _blocks(start, stop, len(offsets)):
            places, length = offsets[row:end] + first, last - first
            words, picked = _scattered(places, length, wide, key) if scattered else _rows(places, length, wide, runs)
            found = numbers(function, args, kwargs, words, dtype)
            held = rows[row:end, at + first - start : at + last - start]
            picked(held, found)
        at += stop - start
    if out is not target:
        target.copy_(out)


def _row_offsets(region: Region) -> Tensor:
    """Where each row of the region, its last dim, begins in the global sequence: int64, outermost first."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for held, stride in zip(region.ranges[:-1], region.strides[:-1]):
        indices = torch.cat([torch.arange(*span) for span in held]) * stride
        offsets = (offsets.unsqueeze(1) + indices).view(-1)
    return offsets


def _blocks(start: int, stop: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """A span of columns of so many rows, in parts of a chunk: (first column, last, first row, last)."""
    together = max(1, CHUNK // (stop - start))
    for row in range(0, rows, together):
        for first in range(start, stop, CHUNK):
            yield first, min(first + CHUNK, stop), row, min(row + together, rows)


Picked = Callable[[Tensor, Tensor], None]


def _rows(offsets: Tensor, length: int, wide: bool, runs: Runs) -> tuple[Tensor, Picked]:
    """The words of rows that begin at `offsets`, by numpy, and what copies their numbers into place."""
    leads = offsets & 1  # a row begins in the middle of a pair
    scale = 2 if wide else 1  # words per pair
    words = runs.words(((offsets >> 1) * scale).tolist(), (length // 2 + 1) * scale)
    words = torch.from_numpy(words.reshape(-1).view(np.int64))

    def picked(held: Tensor, found: Tensor) -> None:
        found = found.view(len(offsets), -1)
        if bool((leads == leads[0]).all()):
            lead = int(leads[0])
            held.copy_(found[:, lead : lead + length])
        else:
            for row, lead in enumerate(leads.tolist()):
                held[row].copy_(found[row, lead : lead + length])

    return words, picked


def _scattered(offsets: Tensor, length: int, wide: bool, key: Key) -> tuple[Tensor, Picked]:
    """The same in torch ops; every element makes the words of its pair."""
    places = (offsets.unsqueeze(1) + torch.arange(length)).view(-1)
    pairs = places >> 1
    words = words_at(torch.stack([2 * pairs, 2 * pairs + 1], -1).view(-1) if wide else pairs, key)

    def picked(held: Tensor, found: Tensor) -> None:
        held.copy_(found.view(-1, 2).gather(1, (places & 1).unsqueeze(1)).view(held.shape))

    return words, picked
