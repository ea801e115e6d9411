"""A plan against itself: what is wrong with its values before there is a model. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from vescale_dtensor import Placement, Replicate
from vescale_dtensor.engine import WAYS

from .fields import EXPERT_FORMS, PlanFields
from .parts import GLOBS, Boundary, Pipeline, Policy, Precision, check_axis, check_count, check_mapping, misfit


def check_itself(plan: PlanFields) -> None:
    """Raises PlanError for the first value that does not fit the plan's mesh, or the others."""
    for check in CHECKS:
        check(plan)


def check_kinds(plan: PlanFields) -> None:
    """Raises PlanError for a value of another kind than its field's: what is read off a plan may rely on them."""
    if not isinstance(plan.mesh, Mapping):
        rule = f"mesh is {plan.mesh!r}, not a mapping from axes to sizes"
        raise misfit(rule, (), [('mesh={"dp": 2}', "")])
    for name in GLOBS:
        check_mapping("Plan", name, getattr(plan, name))
    for name in ("data_axis", "expert_axis", "context_axis"):
        check_axis("Plan", name, getattr(plan, name), several=name == "data_axis")


def _mesh(plan: PlanFields) -> None:
    for name, size in plan.mesh.items():
        if not isinstance(name, str) or not name:
            raise misfit(f"a mesh axis is named {name!r}, not by a word", (), [('mesh={"dp": 2}', "")])
        if type(size) is not int or size < 1:
            remedies = [(f'mesh={{"{name}": 2}}', "so many ranks")]
            raise misfit(f"mesh axis {name!r} has size {size!r}, which is not a positive number", (), remedies)


def _data_axes(plan: PlanFields) -> None:
    axes, names = plan.data_axes, list(plan.mesh)
    written = tuple(axes) if len(axes) > 1 else plan.data_axis
    for axis in axes:
        if axis not in plan.mesh:
            which = "" if axis == plan.data_axis else f" names {axis!r}, which"
            rule = f"data_axis {written!r}{which} is not an axis of the mesh {plan.mesh}"
            remedies = [(f"data_axis={next(iter(names), None)!r}", ""), ("data_axis=None", "no data parallelism")]
            raise misfit(rule, (), remedies)
    in_order = tuple(sorted(axes, key=names.index))
    if axes != in_order:
        raise misfit(
            f"data_axis {written!r} is not in the order of the mesh {plan.mesh}, outermost first",
            (),
            [(f"data_axis={in_order!r}", "ZeRO shards over the last one, and replicates over the others")],
        )
    if len(set(axes)) < len(axes):
        raise misfit(f"data_axis {written!r} names an axis twice", (), [("name it once", "")])


def _places(plan: PlanFields) -> None:
    for where, placements in _placements_of(plan):
        if not isinstance(placements, Mapping):
            raise misfit(
                f"{where} is {placements!r}, not a mapping from axis names to placements",
                [f"mesh  {plan.mesh}"],
                _meant(next((one for one in plan.mesh if one not in plan.data_axes), "tp"), placements),
            )
        for axis, placement in placements.items():
            _known_axis(plan, where, axis)
            if not isinstance(placement, Placement):
                raise misfit(
                    f"{where} places axis {axis!r} as {placement!r}, which is not a placement",
                    [f"mesh  {plan.mesh}"],
                    _meant(axis, placement),
                )
            is_whole = where.startswith("parameters") and isinstance(placement, Replicate) and plan.mesh[axis] > 1
            if is_whole and plan.zero == 3 and axis == plan.zero_axis != plan.expert_axis:
                raise misfit(
                    f"{where} is replicated over {axis!r}, over which zero=3 shards every parameter",
                    [f"mesh  {plan.mesh}"],
                    [
                        (f"leave {axis!r} out", "ZeRO's shards are no placement: blocks compute with whole parameters"),
                        ("zero=2", "parameters are whole on each rank"),
                    ],
                )


def _meant(axis: str, given: Any) -> list[tuple[str, str]]:
    """Returns what may have been meant by a placement without its axis, or by what is none: a style of others."""
    if isinstance(given, Placement):
        return [(f'{{"{axis}": {given!r}}}', "names the axis")]
    style = ("Plan.from_huggingface(model, mesh=...)", "reads styles in model.tp_plan")
    return [
        (f'{{"{axis}": Shard(0)}}', "others' colwise: of weight [out, in] and bias"),
        (f'{{"{axis}": Shard(1)}}', "others' rowwise: of the weight alone"),
        ("{}", "whole on each rank"),
        *[style] * isinstance(given, str),
    ]


def _placements_of(plan: PlanFields) -> Iterator[tuple[str, Any]]:
    for pattern, placements in plan.parameters.items():
        yield f"parameters[{pattern!r}]", placements
    for pattern, boundary in plan.boundaries.items():
        if not isinstance(boundary, Boundary):
            remedies = [("Boundary(input={...}, output={...})", "")]
            raise misfit(f"boundaries[{pattern!r}] is {boundary!r}, not a Boundary", (), remedies)
        yield f"boundaries[{pattern!r}].input", boundary.input
        yield f"boundaries[{pattern!r}].output", boundary.output
        for name, placements in boundary.arguments.items():
            yield f"boundaries[{pattern!r}].arguments[{name!r}]", placements


def _known_axis(plan: PlanFields, where: str, axis: Any) -> None:
    if axis not in plan.mesh:
        raise misfit(
            f"{where} names axis {axis!r}, which the mesh does not have",
            [f"mesh  {plan.mesh}"],
            [(f"use one of {', '.join(map(repr, plan.mesh))}" if plan.mesh else f'mesh={{"{axis}": 2}}', "")],
        )


def _zero(plan: PlanFields) -> None:
    if type(plan.zero) is not int or not 0 <= plan.zero <= 3:
        raise misfit(
            f"zero is {plan.zero!r}, which is not a stage",
            (),
            [
                ("zero=1", "optimizer states are sharded over the data axis"),
                ("zero=2", "and gradients"),
                ("zero=3", "and parameters"),
            ],
        )
    if plan.zero and plan.zero_axis is None:
        raise misfit(
            f"zero={plan.zero} shards over the data axis, and the plan has none",
            [f"mesh  {plan.mesh}"],
            [("data_axis=...", "names an axis of the mesh"), ("zero=0", "nothing is sharded over data parallel ranks")],
        )


def _pipeline(plan: PlanFields) -> None:
    pipeline = plan.pipeline
    if pipeline is None:
        return
    if not isinstance(pipeline, Pipeline):
        raise misfit(f"pipeline is {pipeline!r}, not a Pipeline", (), [("pipeline=Pipeline(...)", "")])
    _known_axis(plan, "pipeline", pipeline.axis)
    if pipeline.axis in plan.data_axes:
        raise misfit(
            f"axis {pipeline.axis!r} is both the pipeline's and a data axis",
            [f"mesh  {plan.mesh}"],
            [('mesh={"pp": 2, "dp": 2}', "an axis for each")],
        )
    for where, placements in _placements_of(plan):
        if pipeline.axis in placements:
            raise misfit(
                f"{where} places a tensor on axis {pipeline.axis!r}, whose ranks hold different stages",
                [f"mesh  {plan.mesh}"],
                [(f"leave {pipeline.axis!r} out", "a tensor lies on the ranks of its stage alone")],
            )
    ranks = plan.mesh[pipeline.axis]
    if pipeline.stages != ranks * pipeline.virtual:
        raise misfit(
            f"{len(pipeline.cuts)} cuts make {pipeline.stages} stages, and {ranks} ranks of axis {pipeline.axis!r} "
            f"with virtual={pipeline.virtual} hold {ranks * pipeline.virtual}",
            [f"cuts  {', '.join(pipeline.cuts) or 'none'}"],
            [(f"cuts=({ranks * pipeline.virtual - 1} module names)", "the modules that begin stages 1, 2, ...")],
        )
    if isinstance(pipeline.schedule, Mapping):
        written = {"ranks": ranks, "microbatches": pipeline.microbatches, "stages": pipeline.stages}
        for name, expected in written.items():
            if pipeline.schedule.get(name) != expected:
                raise misfit(
                    f"the schedule is written for {name}={pipeline.schedule.get(name)!r}, and the plan has {expected}",
                    (),
                    [("generate the schedule for the plan's numbers", "")],
                )


def _globs(plan: PlanFields) -> None:
    for name in ("checkpointing", "regather", "offload_activations"):
        for pattern, value in getattr(plan, name).items():
            if not isinstance(value, bool):
                remedies = [(f'{{"{pattern}": True}}', ""), (f'{{"{pattern}": False}}', "an exception to later globs")]
                raise misfit(f"{name}[{pattern!r}] is {value!r}, neither True nor False", (), remedies)
    for pattern, rows in plan.blocks.items():
        check_count("Plan", f"blocks[{pattern!r}]", rows)


def _precision(plan: PlanFields) -> None:
    if plan.precision is not None and not isinstance(plan.precision, Precision):
        remedies = [("precision=Precision(compute=torch.bfloat16, reduce=torch.float32)", "")]
        raise misfit(f"precision is {plan.precision!r}, not a Precision", (), remedies)


def _policies(plan: PlanFields) -> None:
    for pattern, policy in plan.policies.items():
        where = f"policies[{pattern!r}]"
        if not isinstance(policy, Policy):
            raise misfit(f"{where} is {policy!r}, not a Policy", (), [(f'{{"{pattern}": Policy(zero=2)}}', "")])
        if policy.zero and plan.zero_axis is None:
            remedies = [("data_axis=...", "names an axis of the mesh")]
            raise misfit(f"{where} shards over the data axis, and the plan has none", (), remedies)
        if policy.zero and plan.sums == "all_reduce":
            rule = f"{where} keeps a part of gradients, and sums='all_reduce' all of them"
            raise misfit(rule, (), [('sums="ordered"', "")])
        if policy.precision is not None and plan.pipeline is not None:
            remedies = [("precision=...", "one for all stages, but for its products"), ("without a pipeline", "")]
            own = replace(policy.precision, products=plan.precision.products) if plan.precision is not None else None
            if own != plan.precision or own is None:
                raise misfit(f"{where} has a precision of its own, and stages pass on one dtype", (), remedies)


def _offload(plan: PlanFields) -> None:
    if not isinstance(plan.offload, bool):
        remedies = [("offload=True", "optimizer states live in host memory")]
        raise misfit(f"offload is {plan.offload!r}, neither True nor False", (), remedies)


def _accumulation(plan: PlanFields) -> None:
    check_count("Plan", "accumulation", plan.accumulation)
    if plan.accumulation > 1 and plan.pipeline is not None:
        remedies = [("Pipeline(microbatches=...)", "a call of the model adds up their gradients")]
        raise misfit("a plan with a pipeline accumulates over its microbatches", (), remedies)


def _ahead(plan: PlanFields) -> None:
    if type(plan.prefetch) is not int or plan.prefetch < 0:
        remedies = [("prefetch=1", "the next block is gathered ahead"), ("prefetch=0", "none is")]
        raise misfit(f"prefetch is {plan.prefetch!r}, not a number of blocks", (), remedies)
    if plan.prefetch != 1 and plan.zero < 3 and plan.precision is None and not plan.policies:
        remedies = [("zero=3", "gathers parameters block by block"), ("precision=...", "does, too"), ("prefetch=1", "")]
        raise misfit(f"prefetch={plan.prefetch} where no parameters are gathered", (), remedies)
    if plan.ahead_bytes is not None:
        check_count("Plan", "ahead_bytes", plan.ahead_bytes)


def _sums(plan: PlanFields) -> None:
    if plan.sums not in ("ordered", "all_reduce"):
        remedies = [('sums="ordered"', "in the order of ranks"), ('sums="all_reduce"', "by one collective")]
        raise misfit(f"sums is {plan.sums!r}, neither 'ordered' nor 'all_reduce'", (), remedies)
    if plan.sums == "all_reduce" and plan.zero:
        remedies = [("zero=0", "every rank keeps all gradients"), ('sums="ordered"', "")]
        raise misfit(f"sums='all_reduce' where each rank keeps a part (zero={plan.zero})", (), remedies)
    if plan.sums == "all_reduce" and plan.precision is not None and plan.precision.sent is not None:
        remedies = [("Precision(sent=None)", "what travels is what is summed"), ('sums="ordered"', "")]
        raise misfit("an all-reduce sums in the dtype in which gradients travel", (), remedies)


def _expert_axis(plan: PlanFields) -> None:
    if plan.expert_axis is not None:
        _known_axis(plan, "expert_axis", plan.expert_axis)
    for pattern, form in plan.experts.items():
        if form not in tuple(EXPERT_FORMS):  # a list has no hash
            remedies = [(f'{{"{pattern}": "{one}"}}', what) for one, what in EXPERT_FORMS.items()]
            raise misfit(f"experts[{pattern!r}] is {form!r}, neither 'indices' nor 'counts'", (), remedies)
        if plan.expert_axis is None:
            remedies = [('expert_axis="ep"', "the axis over which they are spread"), ("leave experts out", "")]
            raise misfit(f"experts[{pattern!r}] without an expert axis says nothing", (), remedies)
    factor = plan.capacity_factor
    if factor is None:
        return
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
        remedies = [("capacity_factor=1.25", "a quarter more than an even load"), ("capacity_factor=None", "no limit")]
        raise misfit(f"capacity_factor is {factor!r}, not a positive number", (), remedies)
    if plan.expert_axis is None:
        remedies = [('expert_axis="ep"', "of one rank, be it"), ("capacity_factor=None", "no limit")]
        raise misfit(f"capacity_factor={factor} without an expert axis limits nothing", (), remedies)


LAYOUTS = ("auto", "contiguous", "zigzag")


def _context(plan: PlanFields) -> None:
    axis = plan.context_axis
    for name, known, what in (("context", WAYS, "way of attention"), ("context_layout", LAYOUTS, "layout")):
        said = getattr(plan, name)
        if said not in known:
            raise misfit(f"{name} is {said!r}, which is no {what}", (), [(f"{name}={one!r}", "") for one in known])
        if axis is None and said != "auto":
            remedies = [('context_axis="cp"', "the axis over which sequences are cut")]
            raise misfit(f"{name}={said!r} without a context axis", (), remedies)
    if axis is None:
        return
    _known_axis(plan, "context_axis", axis)
    taken = {"data_axis": plan.data_axes, "expert_axis": (plan.expert_axis,)}
    taken["pipeline"] = (plan.pipeline.axis,) if plan.pipeline is not None else ()
    for field, axes in taken.items():
        if axis in axes:
            remedies = [(f'mesh={{..., "{axis}_context": 2}}', "an axis for each")]
            raise misfit(f"axis {axis!r} is both context_axis and {field}", [f"mesh  {plan.mesh}"], remedies)


CHECKS: tuple[Callable[[PlanFields], None], ...] = (
    _mesh,
    _data_axes,
    _places,
    _zero,
    _pipeline,
    _globs,
    _precision,
    _policies,
    _offload,
    _sums,
    _expert_axis,
    _accumulation,
    _ahead,
    _context,
)
