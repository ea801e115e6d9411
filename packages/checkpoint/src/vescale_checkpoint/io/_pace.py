"""Paces a save in the background: it takes half of a processor, until somebody waits for it."""

from __future__ import annotations

import threading
import time

LEAST_SECONDS = 1e-3
"""Seconds of work between two rests: a shorter rest costs more than it gives."""


class Pace:
    """Paces one thread, which asks for rests between the chunks that it writes.

    Training runs beside it: checksums and copies into the kernel take a core for as long as there are bytes, and a rank
    that has no core to spare is slowed by as much. A rest is as long as the work before it. Who waits for the save ends
    the rests, and so does the end of the process.
    """

    def __init__(self) -> None:
        self._hurry = threading.Event()
        self._since: float | None = None

    def hurry(self) -> None:
        """Somebody waits: no rests from here on. From any thread."""
        self._hurry.set()

    def rest(self) -> None:
        """Sleeps for as long as this thread has computed since the last rest."""
        now = time.thread_time()
        worked = 0.0 if self._since is None else now - self._since
        if self._since is None:
            self._since = now
        if worked >= LEAST_SECONDS and threading.main_thread().is_alive():
            self._hurry.wait(worked)
            self._since = time.thread_time()
