"""generate_plan: the whole plan of an unmodified model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..plan import Pipeline, Placements, Plan, PlanError
from .candidates import Candidate, candidates
from .cost import Cost, cost_of
from .hardware import GIB, Hardware, hardware_of
from .memory import Memory, memory_of
from .probe_sample import POSITIONS, sample_of
from .probe_structure import structure_of
from .sizes import sizes_of
from .structure import Structure
from .tensor_plan import tensor_parallel_plan

MARGIN = 0.94
"""Of a device's memory that a plan may fill: the allocator and the communication library want the rest."""
MOST = 1 << 14
"""Ranks up to which a world that would do is looked for."""
ASKED = ("world_size", "batch", "seq", "hardware", "memory", "objective", "pin", "forbid", "overrides", "sample")


class InfeasibleError(PlanError):
    """No plan satisfies the request; the text names what binds, and the nearest plan that does fit."""


@dataclass(frozen=True)
class Estimate:
    """A candidate with what it costs.

    Arguments:
        cost: seconds of one step.
        memory: bytes of the fullest rank.
    """

    candidate: Candidate
    cost: Cost
    memory: Memory


def generate_plan(model: nn.Module, constraints: Mapping[str, Any] | None = None, **asked: Any) -> Plan:
    """The plan that a cost model finds fastest among all that fit; the model is not changed, nor is its code read.

    Arguments, as keywords, or in one mapping `constraints`, or in both:
        world_size: ranks.
        batch: rows of the global batch.
        seq: positions of a row; by default those of `sample`.
        hardware: a profile's name ("a100", "h100", "h200", "l40s", "cpu"), a `Hardware`, or "auto".
        memory: bytes of one device that may be used; by default the profile's, less a margin.
        objective: "time", or "memory" for the smallest peak.
        pin: {"tp": 8}: degrees and settings that are given; see `Candidate` for their names.
        forbid: names that must not be used ("pp", "sp", "zero"), or combinations ({"tp": 4, "zero": 3}).
        overrides: parameter glob -> placements, before all others.
        sample: what the model is called with: a tensor, a tuple of arguments or a dict of keywords, one row or more.
            Not needed for a model that takes `input_ids`.

    Deterministic; no process group, no GPU, and no weight is needed.

    Raises InfeasibleError when nothing fits, PlanError for a request that is none.
    """
    request = {**(constraints or {}), **asked}
    for name in request:
        if name not in ASKED:
            raise PlanError("generate_plan", f"{name!r} is no constraint", (), [(f"one of {', '.join(ASKED)}", "")])
    for name in ("world_size", "batch"):
        if type(request.get(name)) is not int or request[name] < 1:
            raise PlanError(
                "generate_plan", f"{name} is {request.get(name)!r}, not a positive number", (), [(f"{name}=8", "")]
            )
    sample = sample_of(model, request.get("sample"))
    structure = structure_of(model, sample)
    seq = request.get("seq") or sample.positions or POSITIONS
    best = ranked(
        structure,
        request["world_size"],
        request["batch"],
        seq,
        hardware_of(request.get("hardware", "auto")),
        memory=request.get("memory"),
        objective=request.get("objective", "time"),
        pin=request.get("pin"),
        forbid=request.get("forbid", ()),
    )[0]
    return plan_of(structure, best.candidate, overrides=request.get("overrides"))


def ranked(
    structure: Structure,
    world_size: int,
    batch: int,
    seq: int,
    hardware: Hardware,
    *,
    memory: float | None = None,
    objective: str = "time",
    pin: Mapping[str, Any] | None = None,
    forbid: Sequence[str | Mapping[str, Any]] = (),
) -> list[Estimate]:
    """All candidates that fit, best first. Raises InfeasibleError when none does."""
    if objective not in ("time", "memory"):
        raise PlanError("generate_plan", f"objective is {objective!r}", (), [('objective="time"', 'or "memory"')])
    limit = MARGIN * hardware.memory if memory is None else memory
    legal = list(candidates(structure, world_size, batch, seq=seq, pin=pin, forbid=forbid))
    if not legal:
        raise _nothing_legal(structure, world_size, batch, seq, pin, forbid)
    sizes = {tp: sizes_of(structure, tp) for tp in sorted({one.tp for one in legal})}
    estimates = [
        Estimate(
            one,
            cost_of(sizes[one.tp], one, hardware, batch, seq),
            memory_of(sizes[one.tp], one, hardware, batch, seq),
        )
        for one in legal
    ]
    fitting = [one for one in estimates if one.memory.total <= limit]
    if not fitting:
        raise _too_large(structure, estimates, limit, world_size, batch, seq, hardware, forbid)
    if objective == "time":
        return sorted(fitting, key=lambda one: (one.cost.total, one.memory.total, one.candidate))
    return sorted(fitting, key=lambda one: (one.memory.total, one.cost.total, one.candidate))


def plan_of(structure: Structure, candidate: Candidate, *, overrides: Mapping[str, Placements] | None = None) -> Plan:
    """The `Plan` of a candidate."""
    sizes = {"pp": candidate.pp, "dp": candidate.dp // candidate.ep, "ep": candidate.ep, "tp": candidate.tp}
    mesh = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    parameters: Mapping[str, Placements] = {"*": {}}
    boundaries: Mapping[str, Any] = {}
    if candidate.tp > 1:
        tensor = tensor_parallel_plan(structure, candidate.tp, sequence_parallel=candidate.sp)
        parameters, boundaries = tensor.parameters, tensor.boundaries
    pipeline = None
    if candidate.pp > 1:
        pipeline = Pipeline(cuts=_cuts(structure, candidate.pp), microbatches=candidate.microbatches)
    return Plan(
        mesh=mesh,
        parameters={**(overrides or {}), **{k: v for k, v in parameters.items() if k not in (overrides or {})}},
        boundaries=boundaries,
        data_axis=tuple(name for name in ("dp", "ep") if name in mesh) or None,
        expert_axis="ep" if candidate.ep > 1 else None,
        zero=candidate.zero,
        pipeline=pipeline,
        checkpointing={name: True for one in structure.blocks for name in one.patterns}
        if candidate.checkpointing
        else {},
    )


def _cuts(structure: Structure, stages: int) -> tuple[str, ...]:
    """Where stages begin, with blocks dealt out evenly; the first and the last stage, which hold more, get fewer."""
    points = structure.cut_points
    blocks = len(points) + 1
    return tuple(points[(at * blocks) // stages - 1] for at in range(1, stages))


# ---------------------------------------------------------------------- refusals


def _nothing_legal(structure, world_size, batch, seq, pin, forbid) -> InfeasibleError:
    free = list(candidates(structure, world_size, batch, seq=seq))
    coupled = f"none: rows of the batch meet in {structure.coupled[0]}" if structure.coupled else f"up to {batch}"
    facts = [
        f"tensor parallelism splits by  {list(structure.degrees) or 'nothing'}",
        f"pipeline stages  up to {len(structure.cut_points) + 1}",
        f"data parallelism  {coupled}",
    ]
    if free:
        wanted = asdict(free[0]) | dict(pin or {})
        near = min(free, key=lambda one: (_distance(asdict(one), wanted, pin or {}), one))
        rule = f"pin={dict(pin or {})} and forbid={list(forbid)} leave no plan for {world_size} ranks and batch {batch}"
        return InfeasibleError("generate_plan", rule, facts, [(f"pin={_pins(near, pin or {})}", f"nearest: {near}")])
    nearest = max(n for n in range(1, world_size) if any(True for _ in candidates(structure, n, batch, seq=seq)))
    rule = f"{world_size} ranks cannot all be used with batch {batch}"
    return InfeasibleError("generate_plan", rule, facts, [(f"world_size={nearest}", ""), (f"batch={world_size}", "")])


def _distance(values: Mapping[str, Any], wanted: Mapping[str, Any], pin: Mapping[str, Any]) -> float:
    return sum(abs(float(values[name]) - float(wanted[name])) for name in pin)


def _pins(candidate: Candidate, pin: Mapping[str, Any]) -> dict[str, Any]:
    values = asdict(candidate)
    return {name: values[name] for name in pin}


def _too_large(structure, estimates, limit, world_size, batch, seq, hardware, forbid) -> InfeasibleError:
    least = min(estimates, key=lambda one: (one.memory.total, one.candidate))
    parts = sorted(asdict(least.memory).items(), key=lambda item: -item[1])
    facts = [f"least  {least.candidate}: {least.memory.total / GIB:.2f} GiB a rank"]
    facts.append("of which  " + ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts if size))
    remedies = [(f"memory={least.memory.total}", f"bytes; the least that {world_size} ranks need")]
    sizes = {tp: sizes_of(structure, tp) for tp in (1, *structure.degrees)}
    more = world_size
    while more < MOST:
        more *= 2
        rows = max(batch, more)
        grown = candidates(structure, more, rows, seq=seq, forbid=forbid)
        if min((memory_of(sizes[one.tp], one, hardware, rows, seq).total for one in grown), default=limit + 1) <= limit:
            remedies.append((f"world_size={more}, batch={rows}", "ranks as large as these, and a row for each"))
            break
    rule = f"memory binds: no plan for {world_size} ranks stays within {limit / GIB:.2f} GiB a rank"
    return InfeasibleError("generate_plan", rule, facts, remedies)
