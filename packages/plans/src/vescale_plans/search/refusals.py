"""Refusals: what binds where no plan satisfies a request, and the nearest requests that one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import ceil
from typing import Any

from .._plan.parts import PlanError
from .candidates import Candidate, meets_in_attention
from .pricer import Pricer, Request
from .pricing.hardware import GIB

MOST = 1 << 14
"""Ranks up to which a world that would do is looked for."""


class InfeasibleError(PlanError):
    """No plan satisfies the request. The text names the limiting constraint, and the nearest plan that does fit."""


def nothing_legal(request: Request) -> InfeasibleError:
    """No candidate for the world size and the batch, or none that pins and forbids leave."""
    structure, world, batch = request.structure, request.world_size, request.batch
    coupled = f"none: rows of the batch meet in {structure.coupled[0]}" if structure.coupled else f"up to {batch}"
    stages = 1 if structure.coupled else len(structure.cut_points) + 1
    facts = [
        f"tensor parallelism splits by  {list(structure.degrees) or 'nothing'}",
        f"pipeline stages  up to {stages}",
        f"data parallelism  {coupled}",
    ]
    if "cp" in (request.pin or {}):
        met = "up to the ranks that divide them" if meets_in_attention(structure) else "none: positions meet elsewhere"
        facts.append(f"context parallelism cuts sequences  {met}")
    if stages == 1 and not structure.coupled:
        facts += [f"no cut between  {', '.join(one.patterns)}: {one.apart}" for one in structure.blocks] or [
            "no cut between  anything: no list of blocks was found"
        ]
        facts.append('by hand  Plan(pipeline=Pipeline(cuts=("a.module",)), ...): the first call says whether it works')
    if structure.experts:
        facts.append(f"experts spread over  {list(structure.expert_degrees) or 'nothing'}")
    pin = dict(request.pin or {})
    free = request.free().candidates()
    if free:
        near = min(free, key=lambda one: (_distance(one, pin), one))
        rule = f"pin={pin} and forbid={list(request.forbid)} leave no plan for {world} ranks and batch {batch}"
        kept = {name: value for name, value in asdict(near).items() if name in pin}
        remedies = [(f"pin={kept}", f"nearest: {near}")]
        if (other := _world(request, pinned=True)) is not None:
            remedies.append((f"world_size={other}", "with the same pins"))
        if request.forbid and not kept:
            remedies = [("forbid=[]", f"nearest: {near}")]
        return InfeasibleError("generate_plan", rule, facts, remedies)
    remedies = [(f"batch={world}", "a row for each rank")] if not structure.coupled else []
    if (other := _world(request, pinned=False)) is not None:
        remedies.insert(0, (f"world_size={other}", "the most ranks below that can all be used"))
    rule = f"{world} ranks cannot all be used with a batch of {batch}"
    return InfeasibleError("generate_plan", rule, facts, remedies)


def over_memory_by_formula(request: Request, pricer: Pricer) -> InfeasibleError:
    """Every candidate needs more memory than there is."""
    held = ((pricer.least(one), one) for one in request.candidates())
    least = min(((memory.total, one, memory) for memory, one in held if memory is not None), default=None)
    rule = f"memory binds: no plan for {request.world_size} ranks stays within {request.limit / GIB:.4g} GiB a rank"
    if least is None:
        return InfeasibleError("generate_plan", rule, (), [("memory=...", "more bytes a rank")])
    size, candidate, memory = least
    parts = sorted(asdict(memory).items(), key=lambda item: -item[1])
    facts = [
        f"least  {candidate}: {size / GIB:.4g} GiB a rank",
        "of which  " + ", ".join(f"{name} {part / GIB:.4g}" for name, part in parts if part),
    ]
    remedies = [(f"memory={written(size)}", f"the least that {request.world_size} ranks need")]
    fewer = request.batch // 2
    while fewer and not _fits(request, pricer, request.world_size, fewer):
        fewer //= 2
    if fewer:
        remedies.append((f"batch={fewer}", "fewer rows on as many ranks"))
    world = request.world_size
    while world < MOST:
        world *= 2
        rows = max(request.batch, world)
        if _fits(request, pricer, world, rows):
            remedies.append((f"world_size={world}, batch={rows}", "ranks as large as these, and a row for each"))
            break
    return InfeasibleError("generate_plan", rule, facts, remedies)


def over_memory_in_dry_run(request: Request, demoted: Sequence[tuple[Candidate, int]]) -> InfeasibleError:
    """Plans that fit by formula, none of which does in a dry run."""
    least = min(size for _, size in demoted)
    return InfeasibleError(
        "generate_plan",
        f"memory binds: no plan of the best {len(demoted)} stays within {request.limit / GIB:.4g} GiB in a dry run",
        [f"{candidate}  {size / GIB:.4g} GiB" for candidate, size in demoted],
        [
            (f"memory={written(least)}", "what the lightest of them needs"),
            ('objective="memory"', "the lightest plans, not the fastest"),
        ],
    )


def written(size: int) -> str:
    """Formats at least so many bytes, as a person would write them: `round(46.4 * 2**30)`."""
    unit = next((unit for unit in (30, 20, 10) if size >= 1 << unit), 0)
    digits = 3 - len(str(size >> unit))
    scaled = ceil(size / (1 << unit) * 10**digits) / 10**digits
    return f"round({scaled:g} * 2**{unit})" if unit else str(size)


def _fits(request: Request, pricer: Pricer, world: int, batch: int) -> bool:
    held = (pricer.least(one, batch) for one in request.candidates(world, batch))
    return any(memory is not None and memory.total <= request.limit for memory in held)


def _world(request: Request, *, pinned: bool) -> int | None:
    """The nearest world size below, or with pins also above, that all ranks of can be used."""
    asked = request if pinned else request.free()
    for off in range(1, min(request.world_size, MOST)):
        below, above = request.world_size - off, request.world_size + off
        for world in (below, above) if pinned else (below,):
            if world >= 1 and asked.any(world):
                return world
    return None


def _distance(candidate: Candidate, pin: Mapping[str, Any]) -> float:
    values = asdict(candidate)
    return sum(
        float(values[name] != wanted) if name == "inside" else abs(float(values[name]) - float(wanted))
        for name, wanted in pin.items()
    )
