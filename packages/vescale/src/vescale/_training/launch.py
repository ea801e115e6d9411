"""The start of `vescale train`: the ranks of this machine by torchrun, what stops them, and Slurm's requeue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vescale_checkpoint import latest

from .config import Config

PORT = 29513
FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def is_worker() -> bool:
    """True in a rank that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ


def ranks_here(given: int | None) -> int:
    """Returns how many ranks this machine has: as given, or one a GPU, or one."""
    return given or max(torch.accelerator.device_count() if torch.accelerator.is_available() else 1, 1)


def nodes() -> int:
    """Returns the machines of this Slurm job step on which `srun` started this command; 1 without Slurm."""
    return int(os.environ.get("SLURM_STEP_NUM_NODES", 1)) if "SLURM_PROCID" in os.environ else 1


def launched(config: Config, command: Sequence[str], ranks: int) -> bool:
    """Runs `vescale train` with these arguments on ranks of its own, under torchrun. Returns whether it came to the
    last step. Raises SystemExit with torchrun's status where that failed.

    SIGTERM, SIGUSR1 (Slurm's `--signal=USR1@120`) and the first Ctrl-C ask the ranks to save and end, by the file STOP
    in the run's folder, which all machines see; a second Ctrl-C ends them at once.
    """
    stop = Path(config.checkpoint.folder) / "STOP"
    stop.unlink(missing_ok=True)
    start = ["--standalone"] if nodes() == 1 else _rendezvous()
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *start]
    # A store of its own for each attempt; the number of threads, of which torchrun would warn at length.
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    torchrun += ["-m", "vescale", "train", *command]
    running = subprocess.Popen(torchrun, env=os.environ | more, start_new_session=True)
    interrupts = 0

    def ask(number: int, frame: Any) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            os.killpg(running.pid, signal.SIGTERM)
            return
        stop.parent.mkdir(parents=True, exist_ok=True)
        stop.touch()

    before = {one: signal.signal(one, ask) for one in FORWARDED}
    try:
        status = running.wait()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if status:
        raise SystemExit(status)
    return latest(config.checkpoint.folder) == config.training.steps


def requeue() -> None:
    """Puts the Slurm job of this command back into the queue, from its first task; does nothing without Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None and os.environ.get("SLURM_PROCID", "0") == "0":
        subprocess.run(["scontrol", "requeue", job], check=True)
        print(f"vescale train: job {job} is in the queue again", file=sys.stderr, flush=True)


def _rendezvous() -> list[str]:
    """torchrun's options for the machines of a Slurm step: they meet at the first of them."""
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]], check=True, capture_output=True, text=True
    )
    host = shown.stdout.split()[0]
    job = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_STEP_ID', 0)}"
    return [f"--nnodes={nodes()}", f"--rdzv-id={job}", "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{PORT}"]
