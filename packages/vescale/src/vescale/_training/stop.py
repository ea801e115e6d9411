"""Ends a training before its last step: asked for by a signal or a file, agreed on by all ranks."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..metrics import is_first

GRACE_S = 30.0
"""Seconds that torchrun leaves its workers after SIGTERM."""


class Stop:
    """Notes that somebody asked to stop: by SIGTERM, SIGUSR1, the first Ctrl-C, or the file STOP in the run's folder.
    The ranks know together, a step later: the exchange runs beside the step."""

    def __init__(self, folder: Path) -> None:
        self._file, self._signalled, self._since = folder / "STOP", False, 0.0
        self.is_asked = False
        self._flag, self._work = torch.zeros((), dtype=torch.int32), None

    def __enter__(self) -> Stop:
        self._before = {one: signal.signal(one, self._note) for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
        return self

    def __exit__(self, *_: Any) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        if self._work is not None:
            self._work.wait()
        if is_first():
            self._file.unlink(missing_ok=True)

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])  # the second one ends the process
        self._signalled, self._since = True, time.monotonic()

    def ask(self) -> None:
        """Once a step, on every rank. Cost: an all-reduce of one number, waited for in the next step."""
        asked = self._signalled or (is_first() and self._file.exists())
        if not dist.is_initialized() or dist.get_world_size() == 1:
            self.is_asked = asked
            return
        if self._work is not None:
            self._work.wait()
            self.is_asked = bool(self._flag)
        device = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
        self._flag = torch.tensor(int(asked), dtype=torch.int32, device=device)
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)

    def tell_time(self) -> None:
        took = time.monotonic() - self._since if self._signalled else 0.0
        late = f", where torchrun leaves its workers {GRACE_S:.0f} s after SIGTERM" if took > GRACE_S else ""
        say(f"stopped when asked, and saved {took:.1f} s after the signal{late}")


def say(text: str) -> None:
    """Prints a line, on the first rank."""
    if is_first():
        print(f"vescale train: {text}", file=sys.stderr, flush=True)
