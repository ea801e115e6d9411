"""The first cause of a failure, told to every rank of a pipeline.

A rank that fails writes what it was doing into the store, unless somebody was
first, and closes its connections. Ranks that wait for it wake, find the cause, and
close theirs: so the whole pipeline ends within moments, and every rank names the same
rank, stage, action and microbatch.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from ._errors import PipelineError
from ._p2p import LinkError

PATIENCE_S = 2.0
"""How long a rank that saw a connection break waits for the one that broke it to say why."""


class PipelineFailure(PipelineError):
    """A stage raised, or a rank died or went silent; the same text on every rank."""


class Faults:
    """The pipeline's one entry in the store."""

    def __init__(self, name: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"vescale_pipeline/{name}/cause"

    def publish(self, cause: str) -> str:
        """The first cause: this one, unless another rank was first."""
        try:
            return self._store.compare_set(self._key, "", cause).decode() or cause
        except RuntimeError:  # the store went with the rank that held it
            return cause

    def first(self, patience_s: float) -> str | None:
        """What another rank published, waiting a little for it."""
        end = time.monotonic() + patience_s
        try:
            while time.monotonic() < end:
                if self._store.check([self._key]):
                    return self._store.get(self._key).decode()
                time.sleep(0.02)
        except RuntimeError:
            return None
        return None

    def cause_of(self, error: BaseException, rank: int, doing: str) -> str:
        """The first cause, given an error of this rank while it was `doing` something."""
        if isinstance(error, LinkError):
            known = self.first(PATIENCE_S)
            if known is not None:
                return known
            return self.publish(f"rank {rank} waited for {doing}: {error}")
        return self.publish(f"rank {rank} raised in {doing}: {type(error).__name__}: {error}")


def failure(cause: str) -> PipelineFailure:
    return PipelineFailure(
        "pipeline",
        cause,
        (),
        [("mend the cause and start again", "the pipeline's connections are closed on all ranks")],
    )


def seconds(timeout: timedelta) -> float:
    return timeout.total_seconds()
