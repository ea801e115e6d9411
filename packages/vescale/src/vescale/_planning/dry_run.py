"""dry_run of any plan, and generate_plan that verifies by it: the ranks of a pipeline run one by one, each alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import vescale_plans
from vescale_pipeline import Action, Schedule
from vescale_pipeline.action import ALL_MICROBATCHES, FORMAT_VERSION
from vescale_pipeline.engine import READING, Alone, Crossing, Learning, Link, split
from vescale_plans import DryRun, Plan
from vescale_trace.arguments import typed_call

from .._stages import pipelined
from .from_config import as_plan

HOST = "host"
"""Kind of what takes no memory of the device."""
_KINDS = {"F": "activations", "SEND_F": "activations", "RECV_F": "activations", READING: HOST}
"""Kinds of memory that actions make; all others make gradients. Placeholders take no memory."""

if TYPE_CHECKING:  # one signature for both
    from vescale_plans import dry_run as dry_run
else:

    @functools.wraps(vescale_plans.dry_run)
    @typed_call
    def dry_run(plan: Any, model: Any, batch: Any, *given: Any, **more: Any) -> DryRun:
        plan = as_plan(plan, model)
        if not isinstance(plan, Plan) or plan.pipeline is None:
            return vescale_plans.dry_run(plan, model, batch, *given, **more)
        return _in_stages(plan, model, batch, *given, **more)


if TYPE_CHECKING:
    from vescale_plans import generate_plan as generate_plan
else:
    generate_plan = functools.wraps(vescale_plans.generate_plan)(partial(vescale_plans.generate_plan, runner=dry_run))


def _in_stages(plan: Plan, model: Any, batch: Any, *given: Any, rank: int = 0, **more: Any) -> DryRun:
    """Every rank of the pipeline that `rank` is in runs its own stages, by the plan's schedule, with all microbatches.
    What other ranks would tell it is learnt first, of one rank that holds all stages and runs one microbatch."""
    axis = plan.pipeline.axis
    apart = functools.reduce(lambda size, name: size * plan.mesh[name], _after(plan, axis), 1)
    place = rank // apart % plan.mesh[axis]
    first = rank - place * apart
    crossings: dict[tuple[str, int], Crossing] = {}
    whole = _on_one_rank(plan)
    here = rank % apart + rank // (apart * plan.mesh[axis]) * apart
    part = _first_part(batch, plan.pipeline.microbatches)
    learning = _stages(partial(Learning, crossings=crossings))
    vescale_plans.dry_run(whole, model, part, *given, rank=here, stages=learning, **more)
    alone = _stages(partial(Alone, crossings=crossings))
    stages = tuple(
        vescale_plans.dry_run(plan, model, batch, *given, rank=first + at * apart, stages=alone, **more)
        for at in range(plan.mesh[axis])
    )
    return replace(max(stages, key=lambda one: one.peak), stages=stages)


def _after(plan: Plan, axis: str) -> list[str]:
    """Axes along which ranks lie nearer to each other."""
    names = list(plan.mesh)
    return names[names.index(axis) + 1 :]


def _on_one_rank(plan: Plan) -> Plan:
    """All stages on one rank of the pipeline's axis, and one microbatch through them."""
    stages = range(len(plan.pipeline.cuts) + 1)
    actions = [Action("F", stage, 0) for stage in stages] + [Action("B", stage, 0) for stage in reversed(stages)]
    actions += [Action("REDUCE", stage, ALL_MICROBATCHES) for stage in stages]
    given = ("one rank", 1, 1, len(stages), (0,) * len(stages), (tuple(actions),))
    schedule = Schedule(FORMAT_VERSION, *given).to_json()
    pipeline = replace(plan.pipeline, schedule=schedule, microbatches=1, virtual=len(stages))
    return plan.override(mesh={**plan.mesh, plan.pipeline.axis: 1}, pipeline=pipeline, accumulation=1)


def _first_part(batch: Any, count: int) -> Any:
    """The rows of the first microbatch."""
    if isinstance(batch, Mapping):
        return split(((), dict(batch)), count)[0][1]
    many = isinstance(batch, tuple | list)
    args, _ = split((tuple(batch) if many else (batch,), {}), count)[0]
    return args if many else args[0]


def _stages(link: Callable[..., Link]) -> Callable[[Callable[[str], None]], Callable]:
    """Builds the pipeline argument of `vescale_plans.dry_run`."""

    def told(phase: Callable[[str], None]) -> Callable:
        def beginning(action: Action | str) -> None:
            phase(_KINDS.get(action.kind if isinstance(action, Action) else action, "gradients"))

        def made(*given: Any) -> Any:
            phase(HOST)
            try:
                return pipelined(*given, link=link, beginning=beginning)
            finally:
                phase("other")

        return made

    return told
