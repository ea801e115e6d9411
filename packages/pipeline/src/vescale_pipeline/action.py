"""Action and Schedule: what each rank of a pipeline does, in which order, as plain data.

A schedule is everything that the runtime knows: it interprets the actions of its
rank one after another and knows no schedule by name. What is written here is
what `verify` proves, `simulate` times and `draw` shows; a user's own schedule is
the same data.

What an action means:

    F        forward of a stage for one microbatch; keeps its activations
    B        whole backward: gradients of the stage's input and of its weights
    I, W     the two halves of B: gradient of the input (which the stage before
             waits for), then gradients of the weights (which nobody waits for)
    SEND_F   posts the stage's output to the rank of the next stage
    RECV_F   posts a receive of the stage's input
    SEND_B   posts the gradient of the stage's input to the rank of the stage before
    RECV_B   posts a receive of the gradient of the stage's output
    REDUCE   the stage's weight gradients are complete: reduce them, once per step

The stage of a send or receive is always the one that computes with the tensor on
this rank; `peer` is the rank at the other end. Sends and receives are POSTED at
their place, and a compute action waits for what it consumes: so a receive may
stand early, and a transfer runs beside computation. Neighbouring stages on one
rank hand tensors over without actions.

Gradients add up in the order of the stage's B and W actions. Every generator of
`vescale_pipeline.schedules` keeps these in increasing microbatch order on each
stage, so that a pipeline's sums are, to the last bit, those of one device that
accumulates over microbatches 0, 1, ... (`Schedule.adds_in_order`). For a user's
schedule that does not, the runtime is right up to rounding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ._errors import ScheduleError

FORMAT_VERSION = 1
KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE")
COMPUTE = frozenset("FBIW")
TRANSFERS = frozenset(("SEND_F", "RECV_F", "SEND_B", "RECV_B"))
ALL_MICROBATCHES = -1
"""The microbatch of a REDUCE."""


class Action(NamedTuple):
    """One thing that a rank does. It is a tuple, because a schedule of a large job has a million of them.

    Arguments:
        kind: one of KINDS.
        stage: the stage that computes with the tensor, on this rank.
        microbatch: 0 to microbatches - 1; ALL_MICROBATCHES for REDUCE.
        peer: the rank at the other end of a send or receive; None otherwise.
    """

    kind: str
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        where = f"{self.kind}({self.stage}" + ("" if self.kind == "REDUCE" else f", {self.microbatch}")
        toward = " to " if self.kind.startswith("SEND") else " from "
        return where + ")" + ("" if self.peer is None else f"{toward}rank {self.peer}")


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of a pipeline.

    Arguments:
        version: of this format, FORMAT_VERSION.
        name: for people; nothing depends on it.
        ranks: the ranks of the pipeline (of its mesh axis).
        microbatches: the number of parts of a batch.
        stages: the number of stages over all ranks, including virtual stages.
        placement: the rank of each stage.
        actions: the actions of each rank, in order.

    Making one checks nothing; call `verify`.
    """

    version: int
    name: str
    ranks: int
    microbatches: int
    stages: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank owns, in order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @cached_property
    def adds_in_order(self) -> bool:
        """True if each stage's weight gradients are computed in increasing microbatch order."""
        for actions in self.actions:
            last = dict.fromkeys(range(self.stages), -1)
            for kind, stage, microbatch, _ in actions:
                if kind == "B" or kind == "W":
                    if microbatch < last[stage]:
                        return False
                    last[stage] = microbatch
        return True

    @cached_property
    def splits_backwards(self) -> bool:
        """True if gradients of a stage's inputs and of its weights are computed apart."""
        return any(action.kind == "W" for actions in self.actions for action in actions)

    def computed_at(self, stages: Collection[int]) -> dict[tuple[str, int, int], int]:
        """(kind, stage, microbatch) -> place among the actions of the stage's rank, for these stages: of forwards
        ("F"), and of what computes the gradient of a stage's input ("B", whether by B or by I)."""
        return {
            ("B" if kind == "I" else kind, stage, microbatch): at
            for rank in {self.placement[stage] for stage in stages}
            for at, (kind, stage, microbatch, _) in enumerate(self.actions[rank])
            if stage in stages and kind in ("F", "B", "I")
        }

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the content, in hex: equal on two ranks if and only if they would run the same schedule."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; an action is [kind, stage, microbatch] or [kind, stage, microbatch, peer]."""
        return {
            "version": self.version,
            "name": self.name,
            "ranks": self.ranks,
            "microbatches": self.microbatches,
            "stages": self.stages,
            "placement": list(self.placement),
            "actions": [
                [list(action[:3] if action.peer is None else action) for action in actions] for actions in self.actions
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str) -> Schedule:
        """Reads the output of `to_json`, or its text. Raises ScheduleError for anything of another form."""
        fields: Any = value
        if isinstance(value, str):
            try:
                fields = json.loads(value)
            except json.JSONDecodeError as error:
                raise ScheduleError("Schedule.from_json", f"the text is not JSON: {error}") from error
        _check_fields(fields)
        actions = tuple(tuple(map(_read_action, of_rank)) for of_rank in fields["actions"])
        return cls(**{**fields, "placement": tuple(fields["placement"]), "actions": actions})


_INTEGERS = ("version", "ranks", "microbatches", "stages")
_FIELDS = (*_INTEGERS, "name", "placement", "actions")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_fields(value: Any) -> None:
    """The shape of a schedule's JSON, up to its actions."""
    operation = "Schedule.from_json"
    if not isinstance(value, Mapping):
        raise ScheduleError(operation, f"a schedule is a mapping, not {type(value).__name__}")
    version: Any = value.get("version")
    if _is_integer(version) and version > FORMAT_VERSION:
        raise ScheduleError(
            operation,
            f"format version {version} is newer than {FORMAT_VERSION}, the newest that this vescale reads",
            (),
            [("pip install -U vescale-pipeline", "")],
        )
    if missing := [name for name in _FIELDS if name not in value]:
        raise ScheduleError(operation, f"the fields {', '.join(missing)} are missing")
    if unknown := [str(name) for name in value if name not in _FIELDS]:
        raise ScheduleError(operation, f"the fields {', '.join(unknown)} are unknown", [f"known  {', '.join(_FIELDS)}"])
    for name in _INTEGERS:
        if not _is_integer(value[name]) or value[name] < 1:
            raise ScheduleError(operation, f"{name} is {value[name]!r}, not a positive integer")
    if not isinstance(value["name"], str):
        raise ScheduleError(operation, f"name is {value['name']!r}, not a string")
    placement = value["placement"]
    if not isinstance(placement, (list, tuple)) or not all(map(_is_integer, placement)):
        raise ScheduleError(operation, "placement is not a list of ranks")
    actions = value["actions"]
    if not isinstance(actions, (list, tuple)) or not all(isinstance(of_rank, (list, tuple)) for of_rank in actions):
        raise ScheduleError(operation, "actions is not a list, per rank, of lists of actions")


def _read_action(value: Any) -> Action:
    if (
        not isinstance(value, (list, tuple))
        or len(value) not in (3, 4)
        or value[0] not in KINDS
        or not all(map(_is_integer, value[1:3]))
        or not (len(value) == 3 or value[3] is None or _is_integer(value[3]))
    ):
        raise ScheduleError(
            "Schedule.from_json",
            f"{value!r} is not an action [kind, stage, microbatch] or [kind, stage, microbatch, peer]",
            [f"kinds  {', '.join(KINDS)}"],
        )
    return Action(*value)
