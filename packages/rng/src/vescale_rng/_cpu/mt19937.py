"""torch's CPU generator (mt19937) as a tape of 32-bit words: how many a fill takes, and going past them.

Every fill takes its words in the order of memory, so many per element whatever the
values (torch/include/ATen/core/DistributionsHelper.h: 24 random bits for a float, 53
for a double). What remains to know is how many, and that is measured, on torch itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Generator, Tensor

from .jump import N, blocks_ahead

# Bytes of `Generator.get_state` on CPU: seed, words left, seeded, index of the next word, 624 words, cached normals
# (ATen/CPUGeneratorImpl.cpp, CPUGeneratorImplStateLegacy).
_LEFT, _NEXT, _WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * N)
_DISCARD = 1 << 18
_BLOCKS = 200  # how far `is_behind` looks
FAR = 1 << 22  # words from which on a jump is cheaper than drawing


def generator_or_default(generator: Generator | None) -> Generator:
    return torch.default_generator if generator is None else generator


def words_taken(fill: Callable[[Tensor], object], dtype: torch.dtype, generator: Generator, count: int) -> int:
    """The words that `fill` takes for `count` elements of `dtype` (less than 624 in all). `generator` is as before."""
    kept = generator.get_state()
    try:
        generator.manual_seed(0)
        fill(torch.empty(count, dtype=dtype))
        return _following(generator.get_state())
    finally:
        generator.set_state(kept)


def discard(words: int, generator: Generator) -> None:
    """Moves `generator` past `words` of its tape, one by one or, if they are many, by a jump."""
    if words >= FAR:
        _jump(words, generator)
        return
    waste = torch.empty(min(words, _DISCARD), dtype=torch.uint8)  # one word per element
    for done in range(0, words, _DISCARD):
        waste[: min(_DISCARD, words - done)].random_(generator=generator)


def is_behind(state: Tensor, other: Tensor) -> bool:
    """True if a generator in one state of the host's comes to the other by drawing on, some hundred times 624 words
    at most; also if they are one state."""
    generator = Generator()
    generator.set_state(state)
    for blocks in range(_BLOCKS):
        now = generator.get_state()
        if torch.equal(now[_WORDS], other[_WORDS]):
            return bool(blocks) or _following(now) <= _following(other)
        torch.empty(N, dtype=torch.uint8).random_(generator=generator)
    return False


def _following(state: Tensor) -> int:
    return int(state[_NEXT].view(torch.int64))


def _jump(words: int, generator: Generator) -> None:
    """The words of the state are made anew, all at once, when the last was taken and one more is asked for."""
    state = generator.get_state().numpy().copy()
    left, following, block = (state[part].view(kind) for part, kind in ((_LEFT, "i4"), (_NEXT, "u8"), (_WORDS, "u8")))
    taken = N if left[0] == 1 else int(following[0])  # fresh from a seed all count as taken
    blocks, last = divmod(taken + words - 1, N)
    block[:] = blocks_ahead(block.astype(np.uint32), blocks)
    following[0] = last + 1
    left[0] = N - last
    generator.set_state(torch.from_numpy(state))
