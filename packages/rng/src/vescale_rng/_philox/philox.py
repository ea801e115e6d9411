"""Philox4x64-10: random words that are a function of a key and of a place. On CPU by numpy, on CUDA
by a Triton kernel where there is one, else in torch ops.

(Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011, section 3.)
Word w of the sequence of a key is lane w % 4 of the block with counter w // 4 + 1: as
`numpy.random.Philox(key=key).random_raw()` gives them. Words are 64 bits, in int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Generator, Tensor

from .._cpu.scratch import scratch
from .._cuda.kernels import kernels_for

LANES, ROUNDS = 4, 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_MASK = (1 << 64) - 1
_LOW = (1 << 32) - 1
_AT_ONCE = 1 << 13  # words that numpy is asked for: few enough to stay in the cache until they are copied

Key = tuple[int, int]


def next_key(generator: Generator) -> Key:
    """128 bits of the generator: the key of one draw. The generator goes on by as much, whatever is drawn with it."""
    words = torch.empty(2, dtype=torch.int64, device=generator.device)
    first, second = words.random_(-(1 << 63), None, generator=generator).tolist()
    return first & _MASK, second & _MASK


class Runs:
    """Intervals of the word sequence of a key, by numpy; cheapest when they ascend."""

    def __init__(self, key: Key) -> None:
        self._source = np.random.Philox(key=np.array(key, np.uint64))
        self._at = 0  # the next word

    def words(self, starts: Sequence[int], count: int) -> Tensor:
        """`count` words from each of the places `starts`: [len(starts), count], until the next call in this thread."""
        found = scratch("words", len(starts) * count, torch.int64).view(len(starts), count)
        advance, raw, at = self._source.advance, self._source.random_raw, self._at
        for row, start in zip(found.numpy().view(np.uint64), starts):
            if start != at:  # forgets what is left of the last block
                advance((start // LANES - -(-at // LANES)) % (1 << 256))
                if start % LANES:
                    raw(start % LANES, output=False)
            for first in range(0, count, _AT_ONCE):
                row[first : first + _AT_ONCE] = raw(min(_AT_ONCE, count - first))
            at = start + count
        self._at = at
        return found


def words_at(places: Tensor, key: Key) -> Tensor:
    """The words at any places, int64 of the same shape and on the same device: every block is made for one word."""
    kernels = kernels_for(places.device)
    if kernels is not None:
        return kernels.words_at(places, key)
    lanes = _block(places // LANES + 1, key)
    return torch.stack(lanes, -1).gather(-1, (places % LANES).unsqueeze(-1)).squeeze(-1)


def _block(counter: Tensor, key: Key) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b = counter, torch.zeros_like(counter)
    c, d = b, b
    for turn in range(ROUNDS):
        first, second = (_signed(k + turn * w) for k, w in zip(key, _WEYL))
        high_a, low_a = _multiplied(a, _MULTIPLIERS[0])
        high_c, low_c = _multiplied(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
    return a, b, c, d


def _multiplied(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of the unsigned product, by halves; int64 arithmetic wraps."""
    x_high, x_low = _half(x), x & _LOW
    high, low = factor >> 32, factor & _LOW
    lowest = x_low * low
    middle = x_high * low + _half(lowest)
    other = x_low * high + (middle & _LOW)
    return x_high * high + _half(middle) + _half(other), x * _signed(factor)


def _half(x: Tensor) -> Tensor:
    """The upper half, as a number."""
    return (x >> 32) & _LOW


def _signed(word: int) -> int:
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word
