"""The memory that `switch.py` reads in every process: which mutant is on, and which places were reached."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from .switch import _FIRST

VARIABLE = "VESCALE_POWER_BOARD"


class Board:
    """A file in memory. Places count from 1."""

    def __init__(self, path: Path, places: int) -> None:
        path.write_bytes(bytes(_FIRST + places + 1))
        os.environ[VARIABLE] = str(path)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def switch(self, number: int) -> None:
        """Turns a mutant on, and all others off; 0 turns off all."""
        self._memory[:_FIRST] = number.to_bytes(_FIRST, "little")

    def forget(self) -> None:
        """No place counts as reached."""
        self._memory[_FIRST:] = bytes(len(self._memory) - _FIRST)

    def reached(self) -> list[int]:
        return [at for at, byte in enumerate(self._memory[_FIRST:]) if byte]
