"""Words of each rank about itself, again and again, in the store: that it lives, where it stands, what it waits for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

NOWHERE = "no line of the user's"
BEAT_S, LOOKS_PER_S = 1.0, 500
"""A rank looks so often, and all of them together so often at most: a look is three requests to the store."""
_ROOT = "word"


class Word(NamedTuple):
    """One rank's.

    count: grows. place: the line of the user's program that its main thread stands at, for `stood_s` seconds. waits:
    what for, in a communication; "" outside of one. busy: compiling, or saving or loading. has_ended: its program has.
    """

    count: int
    place: str = NOWHERE
    stood_s: float = 0.0
    waits: str = ""
    busy: str = ""
    has_ended: bool = False

    def __str__(self) -> str:
        if self.has_ended:
            return "its program has ended"
        waits = f", in {self.waits}" if self.waits else ""
        busy = f"{self.busy}, " if self.busy else ""
        return f"{busy}at {os.path.basename(self.place)}{waits} for {self.stood_s:.0f} s"


def beat_seconds(size: int) -> float:
    """Returns how often a rank of a world of so many says that it lives."""
    return max(BEAT_S, size / LOOKS_PER_S)


def say(store: Any, rank: int, word: Word) -> None:
    """Cost: one request."""
    store.set(f"{_ROOT}/{rank}", json.dumps(word))


def heard(store: Any, ranks: Iterable[int]) -> Iterator[tuple[int, Word | None]]:
    """Yields ranks and what they said last; None of one that has said nothing. Cost: two requests, or as many per rank
    where some have said nothing or the store reads one key at a time."""
    keys = {rank: f"{_ROOT}/{rank}" for rank in ranks}
    whole = len(keys) > 1 and store.has_extended_api() and store.check(list(keys.values()))
    found = store.multi_get(list(keys.values())) if whole else [
        store.get(key) if store.check([key]) else None for key in keys.values()
    ]  # fmt: skip
    for rank, data in zip(keys, found):
        yield rank, None if data is None else Word(*json.loads(data))


def named_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0, 1`; the first eight of many."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def last_seen(store: Any, ranks: Iterable[int]) -> str:
    """Returns where ranks that answer no more were seen last; "" where that is unknown.

    Of a rank that computes a line of before is known, or none: its stack is looked at while it waits.
    """
    known = [f"rank {rank} at {word.place}" for rank, word in heard(store, ranks) if word is not None]
    seen = [one for one in known if not one.endswith(NOWHERE)]
    return f" (last seen: {', '.join(seen)})" if seen else ""
