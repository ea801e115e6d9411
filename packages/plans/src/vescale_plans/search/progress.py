"""A bar for what takes longer than a second."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")

AFTER = 1.0
"""Seconds before anything is shown."""


class Bar:
    """Shows on standard error, if that is a terminal, how far the steps of one task are, once it has taken `after`
    seconds; of torchrun's ranks the first one shows it.

    Use as a context manager; steps are told by `over`, or one by one by `tick` where their number is not known.
    """

    def __init__(self, console: Console | None = None, after: float = AFTER) -> None:
        self._console = console
        terminal = sys.stderr.isatty() if console is None else console.is_terminal
        self._quiet = not terminal or os.environ.get("RANK", "0") != "0"
        self._due = time.monotonic() + after
        self._shown: Progress | None = None
        self._task: tuple[str, int] | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def over(self, what: str, steps: Sequence[T]) -> Iterator[T]:
        """Yields `steps`."""
        for step in steps:
            yield step
            self.tick(what, len(steps))

    def tick(self, what: str, total: int | None = None) -> None:
        """One step of `what` is done."""
        if self._shown is None:
            if self._quiet or time.monotonic() < self._due:
                return
            self._shown = _progress(self._console)
            self._shown.start()
        if self._task is None or self._task[0] != what:
            if self._task is not None:
                self._shown.remove_task(self._task[1])
            self._task = (what, self._shown.add_task(what, total=total))
        self._shown.advance(self._task[1])


def _progress(console: Console | None) -> Progress:
    # here: most searches show nothing, and `import vescale` is to be quick
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console or Console(stderr=True), transient=True)
