"""Plans with a pipeline: the stages of vescale_pipeline on a mesh of vescale_plans, tensors of vescale_dtensor.

A stage's parameters live on the sub-mesh of its ranks (the mesh without the pipeline's
axis), sharded by the plan as if there were no pipeline. What crosses a cut travels as
local shards, from each rank to the one at the same place of the next stage's sub-mesh,
with its layout told once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

import vescale_plans
from vescale_dtensor import DTensor
from vescale_dtensor.engine import (
    INVARIANT,
    Mesh,
    Transfers,
    await_namespace,
    first_ending,
    from_plain,
    is_reproducible,
    layout_of,
    longest_wait,
    look_with,
    mesh_of,
    show_functions,
)
from vescale_pipeline import Schedule, generate, verify
from vescale_pipeline.engine import Codec, Runtime, ownership, release, seen
from vescale_plans import Pipeline, Plan, PlanError
from vescale_trace.arguments import typed_call

from ._planning.from_config import is_config, plan_from_config
from ._scaler import lines

show_functions(seen)

if TYPE_CHECKING:  # one signature, with its overloads, for both
    from vescale_plans import parallelize as parallelize
else:

    @functools.wraps(vescale_plans.parallelize)
    @typed_call
    def parallelize(plan: Any, *args: Any, **kwargs: Any) -> Any:
        made = functools.partial(plan_from_config, plan) if is_config(plan) else plan
        return vescale_plans.parallelize(made, *args, **{"stages": pipelined, **kwargs})


def pipelined(
    plan: Plan, model: nn.Module, device_mesh: DeviceMesh, **more: Any
) -> tuple[Plan, DeviceMesh, Callable[[], None]]:
    """Pipelines a model for `vescale_plans.parallelize`, once the ranks agree on plan and model; `more` is for the
    runtime."""
    axis = plan.pipeline.axis
    schedule = schedule_of(plan, device_mesh.device_type)
    owned = ownership(model, plan.pipeline.cuts, plan.pipeline.owners)
    others = {name: size for name, size in plan.mesh.items() if name != axis}
    stage_mesh = _mesh_of_stage(device_mesh, tuple(others))
    _make_groups(mesh_of(stage_mesh))
    lines[mesh_of(stage_mesh)] = device_mesh.get_group(axis)
    timeout = longest_wait()
    ranks, group = _line(device_mesh, list(plan.mesh).index(axis), timeout)
    place = ranks.index(dist.get_rank())
    device = torch.device(device_mesh.device_type)
    states = _take_states_of_one_device(model)
    stages = schedule.stages_of(place)
    release(model, {name for stage in stages for name in owned.names_of(stage)}, device)
    stage_plan = plan.override(mesh=others, pipeline=None)

    def finish() -> None:
        codec = ShardCodec(mesh_of(stage_mesh))
        tells, saves = _tell_of_stages(model, axis)
        held = model._vescale
        held.absent.buffers = frozenset(name for name, of in owned.buffers.items() if not set(of) & set(stages))
        held.runtime = runtime = Runtime(
            model,
            schedule,
            owned,
            ranks,
            group,
            await_namespace().store,
            timeout=timeout,
            codec=codec,
            loss=plan.pipeline.loss,
            device=device,
            in_order=is_reproducible,
            during=held.sync.in_parts,
            ended=first_ending,
            watch=look_with,
            recorder=Transfers(axis, group.group_name),
            compute=plan.precision and plan.precision.compute,
            before=held.sync.take_in_before_parts,
            **more,
        )

        def leave() -> None:
            runtime.leave()
            states.remove()
            tells.remove()
            if saves is not None:
                model.__dict__.pop("save_pretrained")
                model.__dict__.update(saves)

        held.leave_stages = leave

    return stage_plan, stage_mesh, finish


def check_stages(plan: Plan, model: nn.Module, device_type: str) -> None:
    """Raises what `pipelined` would for the plan's schedule, cuts and owners. No communication."""
    schedule_of(plan, device_type)
    ownership(model, plan.pipeline.cuts, plan.pipeline.owners)


def schedule_of(plan: Plan, device_type: str) -> Schedule:
    """The plan's schedule, proved right before anything of it runs. Raises ScheduleError, on all ranks alike."""
    schedule = unproved(plan.pipeline, plan.mesh[plan.pipeline.axis])
    # gloo matches messages by their tags, whatever their order. NCCL has one stream per pair of ranks, and a pair's
    # first transfer, and every first header, holds the host: so there a rank may have to do one transfer at a time.
    verify(schedule, transport="buffered" if device_type == "cpu" else "rank")
    return schedule


def unproved(pipeline: Pipeline, ranks: int) -> Schedule:
    """Returns a pipeline's schedule, generated by name or read."""
    if isinstance(pipeline.schedule, str):
        return generate(pipeline.schedule, ranks, pipeline.microbatches, pipeline.virtual)
    return Schedule.from_json(pipeline.schedule)


def _tell_of_stages(model: nn.Module, axis: str) -> tuple[RemovableHandle, dict[str, Any] | None]:
    """A stage's state, of which others would write a file that lacks the other stages', says so when it is read as
    memory; and so does `save_pretrained`, where it is not given a state. Returns the handle of the former, and what the
    model had of its own in place of the latter, None if it has none."""
    error = (
        f"it is of one stage of the pipeline over {axis!r}: what is written of it lacks the other stages' parameters",
        (),
        [
            ("vescale.export_huggingface(path, model)", "on every rank: all stages, as from_pretrained reads them"),
            ('vescale.save(path, {"model": model})', "a checkpoint: any plan and number of ranks loads it"),
            ("tensor.full_tensor()", "this one tensor, plain"),
        ],
    )

    def mark(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for value in state.values():
            if type(value) is DTensor and not isinstance(value, nn.Parameter):
                value._stage = error

    tells = model.register_state_dict_post_hook(mark)
    save = getattr(model, "save_pretrained", None)
    own = {key: value for key, value in vars(model).items() if key == "save_pretrained"}
    if save is not None:

        @functools.wraps(save)
        def refuse(*args: Any, state_dict: dict | None = None, **options: Any) -> Any:
            if state_dict is None:
                raise PlanError("save_pretrained", *error)
            here = set(model.state_dict())
            elsewhere = [name for name in state_dict if ".modules_to_save." in name and name not in here]
            if elsewhere:  # PEFT asks the modules themselves for the names
                raise PlanError(
                    "save_pretrained",
                    "PEFT does not write a module to save that another stage of the pipeline holds",
                    [f"module  {elsewhere[0]}"],
                    [
                        ('vescale.save(path, {"model": model})', "a checkpoint: one device loads it, and saves"),
                        ("torch.save(state, path)", "of what whole_state_dict gave"),
                    ],
                )
            return save(*args, state_dict=state_dict, **options)

        model.save_pretrained = refuse
    return tells, None if save is None else own


def _take_states_of_one_device(model: nn.Module) -> RemovableHandle:
    """`load_state_dict` of one device's state, as under any other plan: the entries of other stages are theirs."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    names = {name for name, _ in named}

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in names - module.state_dict().keys():
            state.pop(prefix + name, None)

    return model.register_load_state_dict_pre_hook(leave_out)


def _mesh_of_stage(device_mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """The part of the plan's mesh that this rank's stage is; the same object for the same mesh and axes, so that
    tensors of several models meet. It is kept on the plan's mesh, with which it ends."""
    known = device_mesh.__dict__.setdefault("_vescale_stages", {})
    if axes not in known:
        known[axes] = device_mesh[axes]
    return known[axes]


def _make_groups(mesh: Mesh) -> None:
    """All process groups of a stage's mesh, now, on all ranks: later only some stages might ask for one."""
    for count in range(1, mesh.ndim + 1):
        for axes in combinations(range(mesh.ndim), count):
            mesh.group(axes)


def _line(device_mesh: DeviceMesh, axis: int, timeout: timedelta) -> tuple[list[int], Any]:
    """This rank's pipeline: the ranks along the mesh's `axis`, and a group that nothing else uses."""
    mine = None
    for line in device_mesh.mesh.movedim(axis, -1).flatten(0, -2).tolist():
        group = dist.new_group(line, timeout=timeout)
        if dist.get_rank() in line:
            mine = (line, group)
    return mine


class ShardCodec(Codec):
    """DTensors travel as their shards; the form is the layout without its mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def encode(self, value: Tensor) -> tuple[Tensor, Any]:
        if type(value) is not DTensor:
            return value, None
        layout = value.mesh_layout
        return value.to_local(), (layout.states, layout.shape)

    def decode(self, tensor: Tensor, form: Any) -> Tensor:
        states, shape = form
        return from_plain(tensor, layout_of(self._mesh, states, shape))

    def lift(self, tensor: Tensor, others: list[Tensor]) -> Tensor:
        """Beside distributed tensors, one that every rank of the stage has."""
        if type(tensor) is DTensor or not any(type(other) is DTensor for other in others):
            return tensor
        return from_plain(tensor, layout_of(self._mesh, (INVARIANT,) * self._mesh.ndim, tuple(tensor.shape)))

    def parts(self, batch: Tensor, count: int) -> Sequence[Tensor]:
        """Cuts a batch into parts; if it is sharded evenly, every rank takes from its own rows: nothing moves."""
        if type(batch) is DTensor:
            local, layout = batch.to_local(), batch.mesh_layout
            ranks = math.prod(layout.mesh.sizes[axis] for axis in layout.axes_of(0))
            if ranks > 1 and layout.shape[0] % (ranks * count) == 0:
                layout = layout.with_shape((layout.shape[0] // count, *layout.shape[1:]))
                return [from_plain(part, layout) for part in super().parts(local, count)]
        return super().parts(batch, count)

    def whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if type(value) is DTensor else value
