"""Candidates: every way to spread a world over data, tensor and pipeline parallelism that a structure allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..plan import PlanError
from .structure import Structure

PINNABLE = ("dp", "tp", "pp", "zero", "sp", "microbatches", "checkpointing")


@dataclass(frozen=True, order=True)
class Candidate:
    """One choice of degrees.

    Arguments:
        pp, dp, tp: ranks along each axis; the mesh is [pp, dp, tp], outermost first.
        sp: activations between tensor-parallel groups are split by position.
        zero: stage over dp.
        microbatches: parts of a rank's batch that go through the pipeline.
        checkpointing: blocks are computed again in backward.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    sp: bool = False
    zero: int = 0
    microbatches: int = 1
    checkpointing: bool = False

    def __str__(self) -> str:
        axes = [f"{name}={size}" for name, size in (("pp", self.pp), ("dp", self.dp), ("tp", self.tp)) if size > 1]
        more = ["sp"] * self.sp + [f"zero={self.zero}"] * bool(self.zero)
        more += [f"microbatches={self.microbatches}"] * (self.microbatches > 1)
        more += ["checkpointing"] * self.checkpointing
        return " ".join(axes + more) or "one device"


def candidates(
    structure: Structure,
    world_size: int,
    batch: int,
    *,
    seq: int | None = None,
    pin: Mapping[str, Any] | None = None,
    forbid: Sequence[str | Mapping[str, Any]] = (),
) -> Iterator[Candidate]:
    """All that are legal, in a fixed order. `pin` and `forbid` as in `generate_plan`."""
    pin = dict(pin or {})
    check_names("pin", pin)
    banned = [
        {one: 1} if one in ("dp", "tp", "pp") else {one: False} if isinstance(one, str) else dict(one) for one in forbid
    ]
    for one in forbid:
        check_names("forbid", (one,) if isinstance(one, str) else one)
    for candidate in _all(structure, world_size, batch, seq):
        values = asdict(candidate)
        if any(values[name] != value for name, value in pin.items()):
            continue
        if any(_is_banned(values, one, rule) for one, rule in zip(forbid, banned)):
            continue
        yield candidate


def check_names(where: str, names) -> None:
    for name in names:
        if name not in PINNABLE:
            raise PlanError(
                "generate_plan", f"{where} names {name!r}", (), [(f"one of {', '.join(PINNABLE)}", "can be named")]
            )


def _is_banned(values: Mapping[str, Any], one: str | Mapping[str, Any], rule: Mapping[str, Any]) -> bool:
    """A name forbids any use of what it names; a mapping forbids that combination."""
    if isinstance(one, str):
        return any(values[name] > value for name, value in rule.items())
    return all(values[name] == value for name, value in rule.items())


def _all(structure: Structure, world_size: int, batch: int, seq: int | None) -> Iterator[Candidate]:
    split = set(structure.degrees)
    stages = len(structure.cut_points) + 1
    for tp in divisors(world_size):
        if tp > 1 and tp not in split:
            continue
        for pp in divisors(world_size // tp):
            dp = world_size // tp // pp
            if pp > stages or dp > batch or (dp > 1 and structure.coupled):
                continue
            for microbatches in _microbatches(pp, batch // dp):
                for sp in (False, True)[: 1 + (tp > 1 and structure.position_dim is not None and (seq or tp) >= tp)]:
                    for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                        for checkpointing in (False, True)[: 1 + bool(structure.blocks)]:
                            yield Candidate(pp, dp, tp, sp, zero, microbatches, checkpointing)


def _microbatches(pp: int, local_batch: int) -> list[int]:
    if pp == 1:
        return [1]
    return [m for m in divisors(local_batch) if pp <= m <= 8 * pp] or [local_batch]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
