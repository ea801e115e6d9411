"""The link of a rank that is alone: a dry run of one stage, with nobody at the other end.

What the other stages would tell is learnt beforehand: one rank that holds all stages hands over, from stage to stage,
what would travel (`Learning`). A rank of the pipeline then has buffers of these forms arrive (`Alone`). Messages that
it sends are held as in a real run, until the end of the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .p2p import Arrival, Header, Link, Part

_HEADERS = {"header F": "F", "header B": "B"}


class Crossing(NamedTuple):
    """A tensor at a cut: its form, and its values unless they are floating point numbers (indices, masks)."""

    header: Header
    values: list[Tensor | None]


class Learning(Link):
    """Link of one rank that holds all stages: fills `crossings`, by kind ("F", "B") and the stage that is reached."""

    def __init__(self, *given: Any, crossings: dict[tuple[str, int], Crossing]) -> None:
        super().__init__(*given)
        self._crossings = crossings

    def handed_over(self, kind: str, stage: int, tensors: list[Tensor | None], header: Header) -> None:
        values = [None if one is None or one.is_floating_point() else one.detach() for one in tensors]
        self._crossings[kind, stage] = Crossing(header, values)


class Alone(Link):
    """Link of one rank of several, on tensors without values. What it is told is what it said itself, but for what
    arrives at its stages: that is in `crossings`."""

    def __init__(self, *given: Any, crossings: dict[tuple[str, int], Crossing]) -> None:
        super().__init__(*given)
        stages = {stage for _, stage in crossings} | {0}
        self._headers = {
            self._tags(told, stage): crossings[kind, stage].header
            for told, kind in _HEADERS.items()
            for stage in stages
            if (kind, stage) in crossings
        }
        self._values = {
            self._tags(kind, stage, microbatch): crossing.values
            for (kind, stage), crossing in crossings.items()
            for microbatch in range(self._tags.microbatches)
        }
        self._said: dict[int, Any] = {}

    @property
    def has_tags(self) -> bool:
        return False

    def send_object(self, peer: int, tag: int, value: Any) -> None:
        self._said[tag] = value

    def receive_object(self, peer: int, tag: int) -> Any:
        return self._headers[tag] if tag in self._headers else self._said.get(tag, ())  # of others' alone, nothing

    def exchange(self, peers: list[int], tag: int, value: list[int]) -> list[list[int]]:
        return [value for _ in peers]

    def post(self, peer: int, tag: int, header: Header) -> Arrival:
        values = self._values.get(tag, (None,) * len(header))
        arrived = [
            None if part is None else self._buffer(part) if value is None else value
            for part, value in zip(header, values)
        ]
        return Arrival(header, arrived, [], self)

    def _buffer(self, part: Part) -> Tensor:
        if not part.shape or not part.dtype.is_floating_point:  # numbers are read; no other integers are known
            return torch.zeros(part.shape, dtype=part.dtype)
        free = self._free.get((part.shape, part.stride, part.dtype))
        return free.pop() if free else torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
