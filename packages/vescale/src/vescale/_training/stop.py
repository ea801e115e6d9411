"""The end of a training before its last step: asked for by a signal or a file, agreed on by all ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 30.0
"""Seconds that torchrun leaves its workers after SIGTERM."""


class Stop:
    """Whether somebody asked to stop: a signal, or the file STOP in the run's folder. The ranks answer together, a step
    later: the exchange runs beside the step."""

    def __init__(self, folder: Path) -> None:
        self._file, self._signalled, self._since = folder / "STOP", False, 0.0
        self.is_asked = False
        self._flag, self._work = torch.zeros((), dtype=torch.int32), None

    def __enter__(self) -> Stop:
        self._before = {one: signal.signal(one, self._note) for one in (signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: Any) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        if self._work is not None:
            self._work.wait()
        if rank() == 0:
            self._file.unlink(missing_ok=True)

    def _note(self, *_: Any) -> None:
        self._signalled, self._since = True, time.monotonic()

    def ask(self) -> None:
        """Once a step, on every rank. Cost: an all-reduce of one number, waited for in the next step."""
        asked = self._signalled or (rank() == 0 and self._file.exists())
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
        late = (
            f"; torchrun ends its workers {GRACE_S:.0f} s after SIGTERM: this save came too late"
            if took > GRACE_S
            else ""
        )
        say(f"stopped when asked, and saved {took:.1f} s after the signal{late}")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def say(text: str) -> None:
    """Prints a line, on the first rank."""
    if rank() == 0:
        print(f"vescale train: {text}", file=sys.stderr, flush=True)
