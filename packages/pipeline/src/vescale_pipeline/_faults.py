"""The first cause of a failure, told to every rank of a pipeline.

A rank that fails writes what it was doing into the store, unless somebody was
first, and closes its connections. Ranks that wait for it wake, find the cause, and
close theirs: so the whole pipeline ends within moments, and every rank names the same
rank, stage, action and microbatch.
"""

from __future__ import annotations

import torch.distributed as dist

from ._errors import PipelineError
from ._p2p import LinkError


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
            return self._store.compare_set(self._key, "", cause).decode()
        except RuntimeError:  # the store went with the rank that held it
            return cause

    def cause_of(self, error: BaseException, rank: int, doing: str) -> str:
        """The first cause, given an error of this rank while it was `doing` something."""
        if isinstance(error, LinkError):  # whoever closes a connection has published before
            return self.publish(f"rank {rank}, in {doing}, lost {error}")
        return self.publish(f"rank {rank} raised in {doing}: {type(error).__name__}: {error}")


def failure(cause: str) -> PipelineFailure:
    return PipelineFailure(
        "pipeline",
        cause,
        (),
        [("mend the cause and start again", "the pipeline's connections are closed on all ranks")],
    )
