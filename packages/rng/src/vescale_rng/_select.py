"""Selects the stream that sharded and deferred tensors are drawn from."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Generator

from vescale_dtensor import VescaleError

Stream = Literal["torch", "philox"]
_current: Stream = "torch"


def current_stream() -> Stream:
    """The name of the stream in use."""
    return _current


class use_stream:
    """Switches to another random stream, either from now on or within a `with` block.

        vescale_rng.use_stream("philox")            # from now on
        with vescale_rng.use_stream("philox"): ...  # here

    `"torch"`, the default, is bitwise what stock torch draws on one device; on a CPU, it takes at most the time of
    drawing the global tensor. In `"philox"`, every value is a function of 128 bits that the draw takes from the
    generator and of the element's global index. The numbers are the same on every mesh and world size, and cost only
    the time of the shard, but they are not those of torch. Only DTensors and deferred tensors draw from it: plain
    tensors always get torch's own numbers.

    Use the same stream on every rank. Both streams keep their state in torch's generators, so `manual_seed`,
    `get_state`, `fork` and the recomputation of a checkpoint work for either. Raises RandomStreamError for another
    name.
    """

    def __init__(self, name: Stream) -> None:
        global _current
        self._before, _current = _current, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        global _current
        _current = self._before


class RandomStreamError(VescaleError):
    """A random stream does not exist, or cannot be used here."""


def manual_seed(seed: int, *, stream: Stream | None = None) -> Generator:
    """Calls `torch.manual_seed(seed)`, and selects the stream if one is named. Call it on every rank alike."""
    if stream is not None:
        use_stream(stream)
    return torch.manual_seed(seed)
