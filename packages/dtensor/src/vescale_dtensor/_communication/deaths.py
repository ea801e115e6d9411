"""Finds ranks of this machine that ended without a word: by SIGKILL (as where memory runs out), a crash, or `os._exit`.

Such a process tells nobody, and the others see a broken connection, often that of a third rank which followed it. So
each rank leaves its process's id in the store, once, and whoever finds a connection lost looks whether its neighbours'
processes still run. Linux; of other machines only what their own ranks found is known. Nothing is done in a step.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from torch.distributed import Store

WAYS = "SIGKILL (out of memory?), a crash, or gloo's abort, which it prints, where ranks meet in different collectives"


def leave_word(store: Store, rank: int) -> None:
    """Tells the ranks of this machine which process is `rank`. Cost: one request to the store."""
    machine, began = _machine(), _began(os.getpid())
    if machine is not None and began is not None:
        store.append(_key(machine), f"{rank} {os.getpid()} {began}\n")


def remember(store: Store) -> None:
    """Reads which process is which rank, for when the store is gone. Cost: two requests."""
    global _entries
    machine = _machine()
    if machine is not None and store.check([_key(machine)]):
        _entries = [tuple(map(int, line.split())) for line in store.get(_key(machine)).decode().splitlines()]


def gone() -> dict[int, int]:
    """The ranks of this machine whose processes have ended, of those remembered, and these."""
    return {rank: pid for rank, pid, began in sorted(_entries) if _began(pid) != began}


def ended() -> str | None:
    """`gone` in words; None where all run."""
    found = [f"rank {rank} (process {pid})" for rank, pid in gone().items()]
    return f"{', '.join(found)} on {socket.gethostname()}" if found else None


def _key(machine: str) -> str:
    return f"processes/{machine}"


def _machine() -> str | None:
    """Name of the processes among which ids mean the same; None if that cannot be told."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    return None


def _began(pid: int) -> int | None:
    """Returns when a process began, in ticks since this machine's start, by which ids that are given again differ; None
    once it has ended, also while its parent has not asked how."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold anything
        return None if fields[0] in "ZX" else int(fields[19])
    return None


_entries: list[tuple[int, ...]] = []
"""Rank, process, and when that began."""
