"""Finds Python's and numpy's generators in memory.

To ask them costs more than all else of a hand-over, so their memory is looked at first: it says whether a rank has
drawn since, and whether the next one stands where this one does, as ranks with one seed do.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_BYTES = 625 * 4  # a Mersenne twister: 624 words, and how far they are used up


class Place(NamedTuple):
    """A state of a generator. `seen`: its memory, where that says all: no second normal number is kept for later."""

    state: Any
    seen: bytes | None


class Generator:
    """One of this process, and the last place that it was found at, or put to."""

    def __init__(
        self, look: Callable[[], bytes | None], read: Callable[[], Any], write: Callable[[Any], Any],
        keeps: Callable[[Any], bool],
    ) -> None:  # fmt: skip
        """look: its memory, None if that is not known; keeps: whether a state has a number for later."""
        self._look, self._read, self._write, self._keeps = look, read, write, keeps
        self._last: Place | None = None

    def now(self) -> Place:
        """Returns the generator's place."""
        seen = self._look()
        if self._last is None or seen is None or seen != self._last.seen:
            state = self._read()
            self._last = Place(state, None if self._keeps(state) else seen)
        return self._last

    def go_to(self, place: Place) -> None:
        """Puts it where it was found once."""
        known = self._last
        if place is known or (known is not None and place.seen is not None and place.seen == known.seen):
            return
        self._write(place.state)
        self._last = place


def _pythons() -> Callable[[], bytes | None]:
    """Looks at the generator of module `random`, if it lies in memory as CPython's does."""
    start = id(random._inst) + object.__basicsize__
    words = random.getstate()[1]
    seen = ctypes.string_at(start, _BYTES)
    order = sys.byteorder
    if seen != words[-1].to_bytes(4, order) + b"".join(word.to_bytes(4, order) for word in words[:-1]):
        return lambda: None
    return lambda: ctypes.string_at(start, _BYTES)


def _numpys() -> Callable[[], bytes | None]:
    """Looks at numpy's generator; a program may have replaced it by one of another kind."""
    known: Any = None
    start = 0

    def look() -> bytes | None:
        nonlocal known, start
        generator = sys.modules["numpy"].random.get_bit_generator()
        if generator is not known:
            known = generator
            start = generator.ctypes.state_address if type(generator).__name__ == "MT19937" else 0
        return ctypes.string_at(start, _BYTES) if start else None

    return look


pythons = Generator(_pythons(), random.getstate, random.setstate, lambda state: state[2] is not None)
numpys = Generator(
    _numpys(),
    lambda: sys.modules["numpy"].random.get_state(legacy=False),
    lambda state: sys.modules["numpy"].random.set_state(state),
    lambda state: bool(state.get("has_gauss", True)),
)


def places() -> tuple[Place, Place | None]:
    """States of both; None if the program does not use numpy."""
    return pythons.now(), numpys.now() if "numpy" in sys.modules else None


def go_to(found: tuple[Place, Place | None]) -> None:
    """Puts both there."""
    pythons.go_to(found[0])
    if found[1] is not None:
        numpys.go_to(found[1])
