"""The latest draws, for the error that says which call put a rank out of step.

Every draw of this package is noted with the state of its generator before it, as a
number. Draws that go past it (torch's own, on a plain tensor) leave their trace in
the state before the next.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from vescale_dtensor.engine import user_line

from ._cuda.recorded import recorded

KEPT = 256


class Entry(NamedTuple):
    number: int
    name: str
    site: str
    state: int

    def __str__(self) -> str:
        return f"draw {self.number}, {self.name} at {self.site}"


entries: deque[Entry] = deque(maxlen=KEPT)
_count = 0


def note(name: str, generator: Generator) -> None:
    """Notes a draw that is about to be made."""
    global _count
    _count += 1
    state = fingerprint(generator) if recorded() is None else 0  # a graph is captured: the host knows of none
    entries.append(Entry(_count, name, user_line(), state))


def fingerprint(generator: Generator) -> int:
    """A number that tells states of a generator apart, the same in every process."""
    return fingerprint_of(generator.get_state())


def fingerprint_of(state: Tensor) -> int:
    """Likewise, of a state."""
    words = state.view(torch.int64)
    return int(words.dot(torch.arange(1, len(words) + 1)))  # by place: a word left is one word further on
