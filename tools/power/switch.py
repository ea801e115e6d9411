"""Asked by the mutated tree at each place: is this mutant on? Copied into that tree as `vescale_power`."""

import mmap
import os

_FIRST = 8
"""Bytes before the places: the number of the mutant that is on, from 1; 0 for none."""


def _cells() -> memoryview:
    with open(os.environ["VESCALE_POWER_BOARD"], "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


if "VESCALE_POWER_BOARD" in os.environ:
    _memory = _cells()
    _active, _reached = _memory[:_FIRST].cast("Q"), _memory[_FIRST:]

    def is_on(number: int) -> bool:
        """Notes that the place was reached."""
        _reached[number] = 1
        return _active[0] == number

else:

    def is_on(number: int) -> bool:
        return False
