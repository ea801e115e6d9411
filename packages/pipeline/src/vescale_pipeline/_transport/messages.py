"""Names of a pipeline's messages: tags for the transport, words for whoever asks why it hangs."""

from __future__ import annotations

from typing import Any, NamedTuple

PARTS = 64
"""Tensors in one message, at most."""
UNUSED_TAG = (1 << 31) - 1
"""Tag of no message."""
_WORDS = {
    "F": "the activation", "B": "the gradient", "header F": "the header of activations",
    "header B": "the header of gradients", "greet": "the greeting", "loss": "the loss", "norm": "norms of gradients",
    "tied": "gradients of tied weights", "memory": "buffers",
}  # fmt: skip
_KINDS = tuple(_WORDS)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


class Tags:
    """A number for each message of a call; the same message of the next call follows it in order.

    Activations and gradients (F, B) are numbered by the stage that they reach.
    """

    def __init__(self, stages: int, microbatches: int) -> None:
        self._stages, self.microbatches = stages, microbatches

    def __call__(self, kind: str, stage: int = 0, microbatch: int = 0) -> int:
        return ((_NUMBERS[kind] * self._stages + stage) * self.microbatches + microbatch) * PARTS

    def told(self, tag: int) -> str:
        """Describes the message under a tag."""
        rest, part = divmod(tag, PARTS)
        rest, microbatch = divmod(rest, self.microbatches)
        number, stage = divmod(rest, self._stages)
        kind = _KINDS[min(number, len(_KINDS) - 1)]  # of tied weights there may be more than there are numbers
        if kind not in ("F", "B"):
            return f"{_WORDS[kind]}, part {part}"
        return f"{_WORDS[kind]} of microbatch {microbatch} for stage {stage}, part {part}"


class Message(NamedTuple):
    """One transfer, with the same words at both of its ends; `source` and `target` are global ranks."""

    tags: Tags
    call: int
    source: int
    target: int
    tag: int

    def __str__(self) -> str:
        return f"{self.tags.told(self.tag)}, from rank {self.source} to rank {self.target} in call {self.call}"


class Recorder:
    """Is told of every transfer, when it is posted, waited for and over; this one keeps nothing of it."""

    def begin(self, message: Message, is_ordered: bool, received: int) -> Any:
        """Begins an exchange: of two ranks' ordered messages, the n-th of the one is the n-th of the other. `received`:
        bytes. What is returned comes back with the next two."""

    def waits(self, mark: Any) -> None:
        """The host waits for it from now on; on an accelerator its stream does."""

    def ended(self, mark: Any) -> None:
        pass

    def failed(self, mark: Any) -> None:
        """Nobody waits for it any longer."""
