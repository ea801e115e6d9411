"""parallelize: a plan applied to a model and its optimizer, in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, RaggedShard, Shard, register_function
from vescale_dtensor import reproducible as Reproducible
from vescale_dtensor.engine import Mesh, check_order, mesh_of, on_device
from vescale_rng import attributes_of, distribute, is_deferred, materialize
from vescale_trace.stack import PACKAGES

from .._capture.explain import compiled
from .._capture.mode import Mode, check_compiler, mode_of
from .._experts.structure import Experts, find_experts, place_experts
from .._plan.promise import promise, promise_later
from .._plan.validate import Fit, fit
from .._zero.optim import wrap
from ..installed._carried_hooks import carry_hooks
from ..installed._copies import may_be_copied
from ..installed._recipe import Parallelized, Recipe, install
from ..installed._traffic import watch_first_step
from ..plan import Plan, PlanError
from .agreement import check_same_plan, check_same_values, checksums
from .given.absent import Absent, Outside
from .given.adopt import check_given, take_over
from .given.aliases import check_aliases
from .given.arguments import check_made, check_plan, check_values
from .given.identity import Became, become
from .given.of_stage import check_of_stage, made_over
from .given.wrappers import check_unwrapped
from .join import choose_device, is_outside, join, keep_stage_mesh, make_mesh, world_size
from .loss import LossFn
from .together import together

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
OptimizerFn = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
PlanFn = Callable[[nn.Module], Plan]
Stages = Callable[[Plan, nn.Module, Any], tuple[Plan, Any, Callable[[], None]]]
"""What the facade does for a plan with a pipeline, given the mesh: takes the other stages' parameters off the model,
and gives the plan and the mesh of this stage's ranks, and what is to be called last."""


@overload
def parallelize(
    plan: Plan | PlanFn,
    model: Model,
    optimizer_fn: None = None,
    *,
    loss_fn: LossFn | None = None,
    mode: Mode | None = None,
    reproducible: Mapping[str, int] | Reproducible | None = None,
    stages: Stages | None = None,
) -> tuple[Model, None]: ...
@overload
def parallelize(
    plan: Plan | PlanFn,
    model: Model,
    optimizer_fn: Callable[[Iterable[nn.Parameter]], Optimizer] | Optimizer,
    *,
    loss_fn: LossFn | None = None,
    mode: Mode | None = None,
    reproducible: Mapping[str, int] | Reproducible | None = None,
    stages: Stages | None = None,
) -> tuple[Model, Optimizer]: ...
def parallelize(
    plan: Plan | PlanFn,
    model: nn.Module,
    optimizer_fn: OptimizerFn | torch.optim.Optimizer | None = None,
    *,
    loss_fn: LossFn | None = None,
    mode: Mode | None = None,
    reproducible: Mapping[str, int] | Reproducible | None = None,
    stages: Stages | None = None,
) -> tuple[nn.Module, Any]:
    """Shards `model` in place as `plan` says, and creates its optimizer.

    If nothing has joined torch.distributed yet, `parallelize` joins it from torchrun's environment. Without torchrun,
    the same script runs in a world of one rank. If there is an accelerator, the model moves to this rank's device,
    shard by shard, and so does each batch. `model.forward`, parameter names, `state_dict` names and `print(model)` do
    not change.

    Arguments:
        plan: see `Plan`; or a function that makes it of the model. `vescale.parallelize` also takes transformers'
            `DistributedConfig` and accelerate's `ParallelismConfig`, see `plan_from_config`.
        model: a single-device model, built with the same values on every rank (same seed). If it was built under
            `deferred_init`, only this rank's shards are allocated.
        optimizer_fn: makes the optimizer from an iterable of parameters, or from groups of the model's parameters that
            were assembled before. Under a pipeline these, and `model.parameters()` inside of it, are all of the model
            in the order of one device; what has no values here is then left out of the groups. Alternatively, an
            optimizer over the model's parameters, with or without states, which is taken over. Any other optimizer over
            these parameters raises in its step.
        loss_fn: for a model whose forward does not compute the loss. From then on `model(...)` returns
            `loss_fn(output, ...)`, called with the arguments of the call: `model(batch)` is `loss_fn(output, batch)`.
            Keyword arguments that the forward does not take go to `loss_fn` alone. It runs where the output is: under a
            pipeline on the last stage, per microbatch.
        mode: "eager", or "compile": the forward goes through torch.compile, as one graph on a mesh of one rank, block
            by block on several. Calls that the compiler cannot take, or that a debugger
            or a mode watches, are eager; a CompileWarning says why, and so does `explain_compile`. The default is the
            environment variable VESCALE_MODE, or else "eager".
        reproducible: splits, or a mode made from them: turns `vescale.reproducible` on for this call and the rest of
            the process. Eager mode only.
        stages: see `Stages`; `vescale.parallelize` supplies it.

    Returns: the same model, and the optimizer (None without `optimizer_fn`).

    Communicates: a few small all-gathers, of the plan, of checksums of the values, and of the outcome on every rank, so
    that a failure on one rank fails on all, with one message. Raises MeshError; PlanError for the plan, for an unknown
    mode, or if "compile" finds no compiler; PlainTensorError if ranks hold different values.
    """
    join()
    with contextlib.ExitStack() as undo:
        if reproducible is not None:
            with together("reading the splits"):
                on = reproducible if isinstance(reproducible, Reproducible) else Reproducible(reproducible)
                undo.enter_context(on)
        made = _parallelized(plan, model, optimizer_fn, loss_fn, mode, stages)
        undo.pop_all()  # the mode stays on where nothing failed
    return made


def _parallelized(
    plan: Plan | PlanFn,
    model: nn.Module,
    optimizer_fn: OptimizerFn | torch.optim.Optimizer | None,
    loss_fn: LossFn | None,
    mode: Mode | None,
    stages: Stages | None,
) -> tuple[nn.Module, Any]:
    with together("checking the plan"):
        check_plan(plan)
        mode = mode_of(mode)
        if mode == "compile":
            check_order("parallelize", 'mode="compile" computes')
        if hasattr(model, "_vescale"):
            raise PlanError("parallelize", "the model is parallelized already", (), [("build the model anew", "")])
        check_unwrapped(model)
        if not isinstance(plan, Plan):
            plan = plan(model)
            check_plan(plan)
        if plan.pipeline is not None and stages is None:
            remedies = [("vescale.parallelize(plan, model, ...)", "which brings the pipeline's runtime")]
            raise PlanError("parallelize", "the plan has a pipeline, and this package has no runtime", (), remedies)
        if isinstance(optimizer_fn, torch.optim.Optimizer):
            check_given(optimizer_fn, model)
        check_values(model)
        check_aliases(model)
        fitted = fit(plan, model)
        experts = find_experts(plan, model, fitted.experts)
        placed = place_experts(plan, model, experts, fitted.parameters)
        sums = checksums(model)
        device = choose_device(model)
        if mode == "compile":
            check_compiler(device)
    check_same_plan(plan, device)
    check_same_values(sums)
    absent, shards, finish = put_on(plan, model, fitted, experts, placed, loss_fn, stages)
    sync = model._vescale.sync
    for parameter, was in shards.items():
        carry_hooks(was.hooks, parameter)
        if was.old.grad is not None:
            parameter.grad = was.old.grad
    _register_foreign_functions()
    optimizer = None
    if optimizer_fn is not None:
        with together("making the optimizer"):
            if isinstance(optimizer_fn, torch.optim.Optimizer):
                if absent is not None:
                    check_of_stage(optimizer_fn)
                optimizer = take_over(optimizer_fn, model, sync)
            else:
                if absent is None:
                    optimizer = optimizer_fn(model.parameters())
                else:
                    optimizer = made_over(model, optimizer_fn, absent)
                    check_of_stage(optimizer)
                check_made(optimizer, model)
                optimizer = wrap(optimizer, sync, {id(p): name for name, p in model.named_parameters()})
    finish()
    if mode == "compile":
        compiled(model)
    return model, optimizer


def put_on(
    plan: Plan,
    model: nn.Module,
    fitted: Fit,
    experts: Experts,
    placed: dict,
    loss_fn: LossFn | None,
    stages: Stages | None,
) -> tuple[Absent | None, dict[nn.Parameter, Became], Callable[[], None]]:
    """Shards a model's parameters by a plan that fits it, and puts the rest of the plan on it. Returns what this rank
    does not hold, what its parameters were, and what is to be called once their hooks and optimizers are there."""
    absent, finish, whole = None, partial(watch_first_step, model, plan), plan
    again = hasattr(model, "_vescale")
    device_mesh = make_mesh(plan, of_first=again)
    if plan.pipeline is not None:
        if len(plan.mesh) == 1:  # a stage's tensors need a mesh, be it of one rank
            plan = plan.override(mesh={**plan.mesh, "dp": 1})
            device_mesh = make_mesh(plan)
        absent = Absent(model)
        plan, device_mesh, finish = stages(plan, model, device_mesh)
        absent.mark(model)
        keep_stage_mesh(whole, device_mesh)
    recipe = Recipe(plan, device_mesh, fitted, experts, loss_fn)
    outside = is_outside(whole)
    if outside:
        absent, finish, shards = Absent(model), lambda: None, {}
        absent.take_all(model)
        sync = Outside(model, plan, world_size())
        object.__setattr__(model, "_vescale", Parallelized(recipe, sync, [], None, None))
    with together("sharding the model"):
        if not outside:
            shards = _shard_parameters(plan, model, device_mesh, placed, again)
            materialize(model)  # what is no parameter: buffers
            _move_buffers(model, mesh_of(device_mesh))
            install(model, recipe)
            may_be_copied(model)
    model._vescale.whole, model._vescale.absent = whole, absent
    return absent, shards, finish


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Leaves gradients of backwards inside the context unreduced. The first backward outside, or the step, reduces
    their sum.
    """
    with model._vescale.sync.paused():
        yield


def expert_load(model: nn.Module) -> dict[str, list[int]]:
    """Returns how many token copies each expert received in the last forward, by experts module or list.

    Together with `expert_drops` they sum to tokens x k. Cost: one small all-gather per experts module.
    """
    return {boundary.name: boundary.total_load() for boundary in model._vescale.experts}


def expert_drops(model: nn.Module) -> dict[str, list[int]]:
    """Returns how many token copies exceeded each expert's capacity in the last forward, by experts module or list.

    All are zero unless the plan has a `capacity_factor`. Cost: one small all-gather per experts module.
    """
    return {boundary.name: boundary.total_dropped() for boundary in model._vescale.experts}


def _shard_parameters(
    plan: Plan, model: nn.Module, device_mesh: DeviceMesh, placed: dict, later: bool
) -> dict[nn.Parameter, Became]:
    """Every parameter becomes its shard, the object with it; tied parameters, and modules under several names, stay
    one. Returns what the parameters were. `later`: whether values come later."""
    held = list(model.named_parameters(remove_duplicate=False))  # a module under two names would show its shard next
    known: dict[nn.Parameter, Became] = {}
    for name, parameter in held:
        if parameter in known:
            continue
        placements = [
            Shard(one.dims[0]) if isinstance(one, RaggedShard) and size == 1 else one  # outside torchrun all are 1
            for one, size in zip(plan.placements(placed[name]), device_mesh.mesh.shape)
        ]
        if later:
            shard = promise_later(parameter, device_mesh, placements)
        elif is_deferred(parameter) and not any(one.is_partial() for one in placements):
            shard = promise(parameter, device_mesh, placements)
        else:
            sharded = distribute(parameter.detach(), device_mesh, placements)
            shard = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        for key, value in attributes_of(parameter).items():
            setattr(shard, key, value)
        known[parameter] = become(parameter, shard, name)
    return known


def _move_buffers(model: nn.Module, mesh: Mesh) -> None:
    """The modules' buffers, to the device of the parameters; what several modules hold stays one tensor."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and type(buffer) is not DTensor:
                if id(buffer) not in moved:
                    moved[id(buffer)] = on_device(buffer, mesh)
                module._buffers[name] = moved[id(buffer)]


_ENGINES = (*PACKAGES, "torch", "functorch")
_IN_PYTHON = ("torch.distributions",)
"""Parts of torch that are written as user code is, over public functions."""


def _register_foreign_functions() -> None:
    """Every autograd Function of user code gets an `apply` that is right on DTensors (design section 3, contract 3)."""
    waiting = [torch.autograd.Function]
    while waiting:
        for function in waiting.pop().__subclasses__():
            waiting.append(function)
            module = function.__module__
            if module.split(".")[0] not in _ENGINES or module.startswith(_IN_PYTHON):
                register_function(function)
