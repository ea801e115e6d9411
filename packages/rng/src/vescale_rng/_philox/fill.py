"""The `philox` stream: what a shard holds is computed from the key of the draw and the places, at the shard's cost.

A draw takes its key, 128 bits, from torch's generator; what lies at place q of the
global tensor is then a function of the key and of q (`transforms.py`), whatever the
memory order. Places go in panels: the tensor is a matrix, the last dim its columns; a
panel is 256 columns (more where rows are few, the rest in the last), and places go
through it row by row, then to the next. So shards by rows, by columns and in flat parts
are few and long runs of places, which numpy makes at its full speed: a shard by
columns in row-major order would be a run per row, at 3 us each beside its numbers.
Elsewhere than on CPU, and where runs are short, torch ops make the words, two blocks
per element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .._region import Ranges, Region
from .philox import Key, Runs, words_at
from .transforms import is_wide, numbers

CHUNK = 1 << 18  # elements at a time: what a piece costs in Python is little beside it
SHORT = 128  # elements of a run, below which it costs more than its parts
WIDTH, AREA = 256, 1 << 17  # of a panel: its least columns, and the elements up to which it has more


@dataclass(frozen=True)
class Panels:
    """`count` panels side by side, from place `begin`, `step` places each, of which columns `start` to `stop` are held.

    They lie at column `at` of the shard. More than one only where they are held whole.
    """

    begin: int
    step: int
    count: int
    width: int
    start: int
    stop: int
    at: int


def panel_width(rows: int) -> int:
    """Columns of the panels of a matrix of so many rows; even."""
    return max(WIDTH, AREA >> max(rows - 1, 0).bit_length())


def panels(rows: int, columns: int, held: Ranges) -> Iterator[Panels]:
    """Yields the panels of a matrix that its `held` columns touch."""
    full, at = panel_width(rows), 0
    for low, high in held:
        first = low - low % full
        while first < high:
            width = min(full, columns - first)
            start, stop = max(low - first, 0), min(high - first, width)
            count = max(1, (high - first) // full) if start == 0 and width == full else 1
            yield Panels(first * rows, width * rows, count, width, start, stop, at)
            at += count * (stop - start)
            first += count * width


def fill_part(target: Tensor, region: Region, function: Callable, args: tuple, kwargs: dict, key: Key) -> None:
    """Overwrites `target`, which holds `region` of the global tensor, dims in the user's order."""
    if not target.numel():
        return
    out = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device=target.device)
    *outside, columns = region.sizes or (1,)
    *around, held = region.ranges or (((0, 1),),)
    lines = Region((1, *outside), (((0, 1),), *around)).joined()  # a line: rows that follow each other
    matrices = out.view(-1, lines.shape[-1], out.shape[-1] if out.ndim else 1)
    firsts, draw = _offsets(lines), _Numbers(function, args, kwargs, target.dtype, key)
    for side in panels(prod(outside), columns, held):
        at = 0
        for low, high in lines.ranges[-1]:
            for some, these, rows in _blocks(side, len(firsts), high - low):
                found = _part(side, some, firsts[these] + (low + rows.start), rows.stop - rows.start, draw, out.device)
                width = found.shape[-1]
                own = matrices[these, at + rows.start : at + rows.stop, side.at + some.start * width :]
                own = own[..., : len(found) * width].unflatten(-1, (-1, width))
                own.copy_(found.permute(1, 2, 0, 3))
            at += high - low
    if out is not target:
        target.copy_(out)


def _offsets(lines: Region) -> Tensor:
    """The rows at which the last dim of `lines` begins, for every index held of the others: int64."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for held, stride in zip(lines.ranges[:-1], lines.strides[:-1]):
        indices = torch.cat([torch.arange(*span) for span in held]) * stride
        offsets = (offsets.unsqueeze(1) + indices).view(-1)
    return offsets


def _blocks(side: Panels, lines: int, rows: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yields blocks of about a chunk, over all panels, `lines` lines and `rows` rows: (panels, lines, rows)."""
    tall = min(rows, max(1, CHUNK // side.width))
    many = min(lines, max(1, CHUNK // (side.width * tall)))
    broad = max(1, CHUNK // (side.width * tall * many))
    for panel in range(0, side.count, broad):
        for line in range(0, lines, many):
            for row in range(0, rows, tall):
                yield (
                    slice(panel, min(panel + broad, side.count)),
                    slice(line, min(line + many, lines)),
                    slice(row, min(row + tall, rows)),
                )


def _part(side: Panels, some: slice, firsts: Tensor, rows: int, draw: _Numbers, device: torch.device) -> Tensor:
    """Returns the held part of some panels, in lines of `rows` rows that begin at `firsts`: [panels, lines, rows,
    columns]."""
    begins = side.begin + torch.arange(some.start, some.stop) * side.step
    starts = begins.unsqueeze(1) + firsts * side.width
    columns = side.stop - side.start
    if device.type != "cpu" or len(firsts) > 1 and rows * side.width < SHORT:
        inside = torch.arange(rows).unsqueeze(1) * side.width + torch.arange(side.start, side.stop)
        return draw.at((starts[:, :, None, None] + inside).to(device))
    if rows == 1:
        return draw.in_runs(starts.view(-1) + side.start, columns).view(*starts.shape, 1, columns)
    found = draw.in_runs(starts.view(-1), rows * side.width)
    return found.unflatten(1, (rows, side.width)).unflatten(0, starts.shape)[..., side.start : side.stop]


class _Numbers:
    """The numbers of one draw, by their places."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict, dtype: torch.dtype, key: Key) -> None:
        self._made = lambda words: numbers(function, args, kwargs, words, dtype)
        self._words = 2 if is_wide(function, dtype) else 1  # of a pair
        self._key, self._runs = key, Runs(key)

    def in_runs(self, starts: Tensor, length: int) -> Tensor:
        """Draws `length` numbers from each of `starts`, by numpy: [len(starts), length]."""
        leads = starts & 1  # where a run begins in the middle of a pair
        lead = int(leads[0])
        alike = bool((leads == lead).all())
        pairs = (lead + length + 1) // 2 if alike else length // 2 + 1
        words = self._runs.words(((starts >> 1) * self._words).tolist(), pairs * self._words)
        found = self._made(words.view(-1)).view(len(starts), -1)
        return found[:, lead : lead + length] if alike else found.gather(1, leads.unsqueeze(1) + torch.arange(length))

    def at(self, places: Tensor) -> Tensor:
        """Draws numbers at any places, in torch ops, on their device: every element makes the words of its pair."""
        pairs = places.view(-1) >> 1
        first = pairs * self._words
        words = words_at(torch.stack([first + more for more in range(self._words)], -1).view(-1), self._key)
        found = self._made(words).view(-1, 2)
        return found.gather(1, (places.view(-1, 1) & 1)).view(places.shape)
