"""Which pass is running: none (eager), one that is recorded, a trial, or a region of plain code.

Sites (modules under static mode) and the converters of a plan's boundaries ask it what to do.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Pass(Protocol):
    """What a site and a converter call while the pass runs."""

    def enter(self, site: Any, args: tuple, kwargs: dict) -> Any:
        """`site`'s module is called: its forward, or what stands for it."""

    def at_boundary(self, converter: Any, tensor: Tensor) -> Tensor:
        """A plan's boundary meets a tensor."""


running: Pass | None = None


class entered:
    """`with entered(a_pass)`: it is the one that runs."""

    __slots__ = ("_before", "_pass")

    def __init__(self, now: Pass | None) -> None:
        self._pass = now

    def __enter__(self) -> None:
        global running
        self._before, running = running, self._pass

    def __exit__(self, *_: object) -> None:
        global running
        running = self._before
