"""Candidates: every way to spread a world over data, tensor, expert and pipeline axes that a structure allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .._plan.parts import PlanError
from .structure import Structure

AXES = ("dp", "cp", "tp", "pp", "ep")
COUNTS = (*AXES, "microbatches", "virtual")
"""Degrees that are at least one: to forbid one is to forbid more."""
PINNABLE = (*COUNTS, "zero", "sp", "checkpointing", "inside", "offload")
VIRTUAL = (2, 3, 4)
"""Interleaved stages per rank that are tried: as many as runs were published with. More save little of the bubble, and
send more."""
LEAST_POSITIONS = 8192
"""Positions that a rank keeps at least, unless a degree is pinned: of fewer, other axes take more."""


@dataclass(frozen=True, order=True)
class Candidate:
    """One choice of degrees.

    Arguments:
        pp, dp, cp, tp: ranks along each axis; the mesh is [pp, dp, cp, tp], outermost first. Over cp sequences are cut.
        ep: of the dp ranks so many neighbours share the experts; the mesh is [pp, dp / ep, ep, tp] then, and ZeRO
            shards over these neighbours. Not together with cp.
        sp: activations between tensor-parallel groups are split by position.
        zero: stage over dp, without it over cp.
        microbatches: parts of a rank's batch that go through the pipeline; without one (pp 1) each has a forward and
            a backward of its own, and gradients accumulate.
        virtual: stages per rank of the pipeline, interleaved (arXiv 2104.04473, section 2.2); with more than one,
            microbatches go through in whole rounds of pp.
        checkpointing: blocks are computed again in backward.
        inside: of these blocks not all, but these modules alone, by their names in a block: selective recomputation.
        offload: the optimizer's states, and what it steps where that is not computed with, live in host memory.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    sp: bool = False
    zero: int = 0
    microbatches: int = 1
    checkpointing: bool = False
    virtual: int = 1
    cp: int = 1
    inside: tuple[str, ...] = ()
    offload: bool = False

    @property
    def ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.pp * self.replicas * self.tp

    @property
    def replicas(self) -> int:
        """Ranks that compute with the same parameters, experts aside, and sum their gradients."""
        return self.dp * self.cp

    @property
    def sharded(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.ep if self.ep > 1 else self.dp if self.dp > 1 else self.cp

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> ranks, outermost first."""
        return {"pp": self.pp, "dp": self.dp // self.ep, "ep": self.ep, "cp": self.cp, "tp": self.tp}

    def __str__(self) -> str:
        axes = [f"{name}={size}" for name, size in (self.mesh | {"dp": self.dp}).items() if size > 1]
        more = ["sp"] * self.sp + [f"zero={self.zero}"] * bool(self.zero)
        parts = "microbatches" if self.pp > 1 else "accumulation"
        more += [f"{parts}={self.microbatches}"] * (self.microbatches > 1)
        again = f"checkpointing={'+'.join(self.inside)}" if self.inside else "checkpointing"
        more += [again] * self.checkpointing + [f"virtual={self.virtual}"] * (self.virtual > 1)
        more += ["offload"] * self.offload
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
    """All that are legal, in a fixed order. `pin` and `forbid` as in `generate_plan`. Which modules of a block are
    computed again is open in those that may, see `ways`, but where it is pinned. None offloads unless that is pinned:
    what fits without is faster."""
    pin = dict(pin or {})
    check_names("pin", pin)
    if "inside" in pin:
        pin["inside"] = (pin["inside"],) if isinstance(pin["inside"], str) else tuple(pin["inside"])
    banned = _rules(forbid)
    for one in forbid:
        check_names("forbid", (one,) if isinstance(one, str) else one)
    for candidate in _all(structure, world_size, batch, seq, pin, bool(banned)):
        values = _values(candidate) if pin or banned else {}
        is_pinned = all(values[name] == value for name, value in pin.items())
        if is_pinned and not any(_is_banned(values, one, rule) for one, rule in zip(forbid, banned)):
            yield candidate


def ways(
    structure: Structure,
    candidate: Candidate,
    pin: Mapping[str, Any] | None,
    forbid: Sequence[str | Mapping[str, Any]],
) -> list[Candidate]:
    """A candidate that may compute blocks again: all of a block, or some of its modules. One of which that is said, and
    one of all whose blocks are pinned to be, is what it is."""
    if not candidate.checkpointing or candidate.inside or (pin or {}).keys() & {"checkpointing", "inside"}:
        return [candidate]
    rules = list(zip(forbid, _rules(forbid)))
    some = [replace(candidate, inside=inside) for inside in structure.selections]
    return [
        candidate,
        *(one for one in some if not any(_is_banned(_values(one), said, rule) for said, rule in rules)),
    ]


def _rules(forbid: Sequence[str | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    nothing = {**dict.fromkeys(COUNTS, 1), "inside": ()}
    return [{one: nothing.get(one, False)} if isinstance(one, str) else dict(one) for one in forbid]


def _values(candidate: Candidate) -> dict[str, Any]:
    return {name: getattr(candidate, name) for name in PINNABLE}


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


def _all(
    structure: Structure, world_size: int, batch: int, seq: int | None, pin: Mapping[str, Any], banned: bool
) -> Iterator[Candidate]:
    split = set(structure.degrees)
    stages = 1 if structure.coupled else len(structure.cut_points) + 1  # microbatches too would part rows that meet
    for tp in divisors(world_size):
        if tp > 1 and tp not in split:
            continue
        spreads = product(divisors(world_size // tp), _context_degrees(structure, world_size // tp, seq, pin.get("cp")))
        for pp, cp in spreads:
            dp = world_size // tp // pp // cp
            if pp * dp * cp * tp != world_size or pp > stages or dp > batch or (dp > 1 and structure.coupled):
                continue
            spread = [1, *(d for d in structure.expert_degrees if dp % d == 0 and cp == 1)]
            sequence = (False, True)[: 1 + (tp > 1 and structure.position_dim is not None and (seq or tp) >= tp)]
            stage = (0,) if dp * cp == 1 else (0, 1, 2, 3)
            again = [(False, ()), (True, ())][: 1 + bool(structure.blocks)]
            if pin.get("inside") and set(pin["inside"]) <= set(structure.inside):
                again = [(True, pin["inside"])]
            parts = [1] if structure.coupled else _microbatches(pp, batch // dp, batch)
            if cp > 1 and not (structure.coupled or banned or pin.keys() & {"dp", "cp"}):
                parts = [m for m in parts if dp * cp > batch or m not in _microbatches(pp, batch // dp // cp, batch)]
            turns = [1, *(v for v in VIRTUAL if 1 < pp <= stages // v)]
            for microbatches, ep, sp, zero, (checkpointing, inside), virtual in product(
                parts, spread, sequence, stage, again, turns
            ):
                if virtual == 1 or microbatches % pp == 0:
                    rest = (virtual, cp, inside, pin.get("offload") is True)
                    yield Candidate(pp, dp, tp, ep, sp, zero, microbatches, checkpointing, *rest)


def meets_in_attention(structure: Structure) -> bool:
    """True if positions, dim 1 of the input, meet in attention and nowhere else."""
    meets = any(group.positions_meet for group in structure.groups)
    return structure.position_dim == 1 and meets and not structure.mixers


def _context_degrees(structure: Structure, ranks: int, seq: int | None, pinned: int | None) -> list[int]:
    """Degrees of the context axis, among so many ranks: 1 alone if positions meet elsewhere than in attention."""
    cuts = meets_in_attention(structure)
    most = (seq or 1) if pinned else (seq or 1) // LEAST_POSITIONS
    found = [1, *(d for d in range(2, min(ranks, most) + 1) if ranks % d == 0 and (seq or 1) % d == 0 and cuts)]
    return found if pinned is None else [d for d in found if d == pinned]


def _microbatches(pp: int, local_batch: int, batch: int) -> list[int]:
    """Returns counts of microbatches with as many rows each, also of a batch of which ranks have unequal parts."""
    found = [m for m in divisors(local_batch) if batch % m == 0]
    return found if pp == 1 else [m for m in found if m >= pp] or found[-1:]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
