"""Start one script on several processes of this machine, and follow what rank 0 reports.

The processes are started as anyone would by hand, by torchrun; nothing here is special
to the library. Rank 0 appends one JSON line per step to a file, which the starting
process reads as it grows: a file survives whatever becomes of either side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

# A run counts as stuck when no step has finished for so long. Starting four processes
# that import torch and transformers takes 20 s on two slow cores.
PATIENCE_SECONDS = 150.0

POLL_SECONDS = 0.05

# What torchrun needs at most to end its processes once it is told to.
TERMINATE_SECONDS = 40.0

LOG_LINES_SHOWN = 40


class LaunchError(RuntimeError):
    """The processes failed or got stuck; the message holds the failing rank's error."""


def launch(
    script: Path,
    arguments: Sequence[str],
    *,
    processes: int,
    folder: Path,
    log: Path,
    patience: float = PATIENCE_SECONDS,
) -> Iterator[float]:
    """Run `script` on `processes` ranks, yielding the loss of each step as it is reported.

    The script is given ``--stream FOLDER`` after `arguments`, and passes that folder to
    `Stream`. Its output goes to `log`.

    Raises:
        LaunchError: a rank failed, or no step finished for `patience` seconds. The
            processes have been ended by then, as they have when the caller stops early.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(processes)),
        # Port 0: a free one, so that several runs on one machine do not meet.
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *(str(script), *arguments, "--stream", str(folder)),
    ]
    # torchrun would warn that it sets this; the ranks share the cores, one thread each.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield from _follow(process, folder, log, patience)
        finally:
            _end(process)


def _follow(process: subprocess.Popen[bytes], folder: Path, log: Path, patience: float) -> Iterator[float]:
    losses = Stream.path(folder)
    losses.touch()
    with losses.open() as lines:
        last_step = time.monotonic()
        unfinished = ""
        while True:
            # Asked before reading: what an ended process wrote is then read in full.
            status = process.poll()
            for line in lines:
                unfinished += line
                if unfinished.endswith("\n"):
                    yield json.loads(unfinished)["loss"]
                    unfinished, last_step = "", time.monotonic()
            if status == 0:
                return
            if status is not None:
                raise LaunchError(_failure(status, folder, log))
            if time.monotonic() - last_step > patience:
                raise LaunchError(
                    f"no step finished for {patience:.0f} s, so the processes were ended; "
                    f"their output so far ({log}):\n{_tail(log)}"
                )
            time.sleep(POLL_SECONDS)


def _failure(status: int, folder: Path, log: Path) -> str:
    # The first to fail is the cause; the others fail because it is gone.
    errors = sorted(folder.glob("rank*.error"), key=lambda path: path.stat().st_mtime_ns)
    if not errors:
        return f"the processes ended with status {status}; their output ({log}):\n{_tail(log)}"
    others = f" (and {len(errors) - 1} more ranks after it)" if errors[1:] else ""
    return f"{errors[0].stem} failed first{others}; all output is in {log}:\n{errors[0].read_text()}"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]) or "(nothing)"


def _end(process: subprocess.Popen[bytes]) -> None:
    # torchrun gives each rank a session of its own, and ends them when it is asked to end.
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Stream:
    """The other end: how a rank started by `launch` reports its steps, or its error.

    Example (in the started script)::

        with Stream(folder) as report:
            for step in range(steps):
                ...
                report(loss.item())
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rank = int(os.environ["RANK"])
        self._file: TextIO | None = None

    @staticmethod
    def path(folder: Path) -> Path:
        """The file of losses, one JSON object per line."""
        return folder / "losses.jsonl"

    def __enter__(self) -> Callable[[float], None]:
        if self._rank == 0:
            self._file = self.path(self._folder).open("a")
        return self._report

    def _report(self, loss: float) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"loss": loss}) + "\n")
            self._file.flush()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._file is not None:
            self._file.close()
        if isinstance(error, Exception):
            text = "".join(traceback.format_exception(error))
            (self._folder / f"rank{self._rank}.error").write_text(text)
