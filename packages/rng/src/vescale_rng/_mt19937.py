"""torch's CPU generator (mt19937) as a tape of 32-bit words: how many a fill takes, and going past them.

Every fill takes its words in the order of memory, so many per element whatever the
values (torch/include/ATen/core/DistributionsHelper.h: 24 random bits for a float, 53
for a double). What remains to know is how many, and that is measured, on torch itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

# Bytes of `Generator.get_state` on CPU: seed, words left, seeded, index of the next word, 624 words, cached normals
# (ATen/CPUGeneratorImpl.cpp, CPUGeneratorImplStateLegacy).
_NEXT = slice(16, 24)
_DISCARD = 1 << 18


def generator_or_default(generator: Generator | None) -> Generator:
    return torch.default_generator if generator is None else generator


def words_taken(fill: Callable[[Tensor], object], dtype: torch.dtype, generator: Generator, count: int) -> int:
    """The words that `fill` takes for `count` elements of `dtype` (less than 624 in all). `generator` is as before."""
    kept = generator.get_state()
    try:
        generator.manual_seed(0)
        fill(torch.empty(count, dtype=dtype))
        return int(generator.get_state()[_NEXT].view(torch.int64))
    finally:
        generator.set_state(kept)


def discard(words: int, generator: Generator) -> None:
    """Moves `generator` past `words` of its tape. The cheapest fill takes one word per element."""
    waste = torch.empty(min(words, _DISCARD), dtype=torch.uint8)
    for done in range(0, words, _DISCARD):
        waste[: min(_DISCARD, words - done)].random_(generator=generator)
