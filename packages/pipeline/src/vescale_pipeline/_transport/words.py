"""Small Python values between the ranks of a pipeline, through the store of torch.distributed.

For transports without tags: there a value is in nobody's way, takes no turn in a queue,
and the device is not waited for to read it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_SLICE = timedelta(seconds=1)


class LinkError(RuntimeError):
    """A transfer that failed or took too long."""


class Words:
    """Words between this rank and others.

    Arguments:
        store: of the ranks' world; a connection of its own is made, as torch locks one while it waits.
        name: of the pipeline, within the store.
        ranks: the pipeline's global ranks, in order; `place` is this rank's among them.
        timeout: of every wait.
        failed: whether the pipeline is known to have failed: then nothing is waited for.
    """

    def __init__(
        self, store: Any, name: str, ranks: list[int], place: int, timeout: timedelta, failed: Callable[[], bool]
    ) -> None:
        self._store, self._name, self._ranks, self._place = store.clone(), name, ranks, place
        self._timeout, self._failed = timeout, failed
        self._counts: Counter[tuple] = Counter()

    def send(self, peer: int, tag: int, data: bytes) -> None:
        """Cost: one request to the store."""
        try:
            self._store.set(self._key(self._place, peer, tag), data)
        except RuntimeError as error:
            raise LinkError(f"the store: {_first_line(error)}") from error

    def receive(self, peer: int, tag: int) -> bytes:
        """Waits for `peer`'s next word under this tag. Raises LinkError. Cost: three requests."""
        key = self._key(peer, self._place, tag)
        until = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                self._store.wait([key], _SLICE)
                data = self._store.get(key)
                self._store.delete_key(key)
                return data
            except RuntimeError as error:
                late = time.monotonic() > until
                if late or self._failed() or "imed out" not in str(error) and "imeout" not in str(error):
                    raise LinkError(f"rank {self._ranks[peer]}: {_first_line(error)}") from error

    def _key(self, source: int, target: int, tag: int) -> str:
        """Key of the next value; both ends count alike."""
        self._counts[source, target, tag] += 1
        return f"{self._name}/{source}>{target}/{tag}/{self._counts[source, target, tag]}"


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
