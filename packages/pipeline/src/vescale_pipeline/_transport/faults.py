"""The first cause of a failure, told to every rank of a pipeline.

A rank that fails writes what it was doing into the store, unless somebody was
first, and closes its connections. Ranks that wait for it wake, find the cause, and
close theirs: so the whole pipeline ends within moments, and every rank names the same
rank, stage, action and microbatch.

A rank that stopped without dying closes nothing: whoever watches over the ranks finds it (`Runtime.look`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._errors import PipelineError
from .words import LinkError

MOST_TEXT = 4000
"""Characters of an error's text that travel."""


class PipelineFailure(PipelineError):
    """A stage raised an error, or a rank died or stopped responding. The text is the same on every rank."""


class Faults:
    """The pipeline's one entry in the store.

    Arguments:
        store: of the ranks' world.
        name: of the pipeline, within the store.
        ended: what is known of why a rank of the world ended, if anything is.
    """

    def __init__(self, store: Any, name: str, ended: Callable[[], str | None] = lambda: None) -> None:
        self.store = store
        self.key = f"{name}/cause"
        self._ended = ended
        self.known: str | None = None

    @property
    def is_known(self) -> bool:
        """True if this rank knows that the pipeline has failed."""
        return self.known is not None

    def told(self, watch: Any) -> str | None:
        """The first cause, as a thread with a store of its own reads it."""
        return watch.store.get(self.key).decode() if watch.store.check([self.key]) else None

    def publish(self, cause: str, store: Any = None) -> str:
        """The first cause: this one, unless another rank was first."""
        if self.known is None:
            try:
                found = (store or self.store).compare_set(self.key, "", cause).decode()
            except RuntimeError:  # the store went with the rank that held it
                found = cause
            self.known = found
        return self.known

    def cause_of(self, error: BaseException, rank: int, doing: str) -> str:
        """The first cause, given an error of this rank while it was `doing` something."""
        if isinstance(error, LinkError):  # whoever closes a connection has published before
            return self.publish(self._ended() or f"rank {rank}, in {doing}, lost {error}")
        return self.publish(f"rank {rank} raised in {doing}: {type(error).__name__}: {text_of(error)}")


def failure(cause: str) -> PipelineFailure:
    return PipelineFailure(
        "pipeline",
        cause,
        (),
        [("fix the cause and start again", "the pipeline's connections are closed on all ranks")],
    )


def text_of(error: BaseException) -> str:
    """An error's text, of a length that can travel, whatever its `__str__` does."""
    try:
        text = str(error)
    except BaseException as second:  # the user's code; the first cause is what counts
        return f"(its text cannot be told: __str__ raised {type(second).__name__})"
    if len(text) > MOST_TEXT:
        return f"{text[:MOST_TEXT]}... ({len(text):,} characters)"
    return text
