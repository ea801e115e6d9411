"""One rank of a pipeline: what it holds of model and schedule, and its connections to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from .._transport.messages import Tags
from .._transport.p2p import Link
from ..action import Schedule
from .ownership import Ownership
from .stage import Codec, Stage


@dataclass(frozen=True, eq=False)
class Member:
    """See the module. Ranks are the pipeline's own, from 0; `link.ranks` has the world's.

    Arguments:
        parameters: of the model, by name, those that other stages own among them.
        stages: this rank's, by their numbers.
        beside: a context for what ranks tell each other outside of calls, given what they do in words: a lost
            connection ends the pipeline, as in a call.
    """

    schedule: Schedule
    owned: Ownership
    parameters: Mapping[str, nn.Parameter]
    codec: Codec
    link: Link
    tags: Tags
    stages: Mapping[int, Stage]
    beside: Callable[[str], AbstractContextManager] = nullcontext

    @property
    def rank(self) -> int:
        return self.link.rank

    @cached_property
    def places(self) -> Mapping[tuple[str, int, int], int]:
        """Ranks that compute the neighbours of this rank's stages (`Schedule.computed_at`)."""
        near = {one for stage in self.stages for one in (stage - 1, stage + 1)}
        return self.schedule.computed_at(near & set(range(self.schedule.stages)))

    @property
    def last(self) -> int:
        """The rank that has the last stage, and with it the outputs."""
        return self.schedule.placement[-1]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.schedule.ranks) if rank != self.rank]
