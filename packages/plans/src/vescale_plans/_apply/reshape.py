"""reshape: another plan for a model that trains, in place.

All that `parallelize` put on the model goes, but for its hooks' places among users' own. Each parameter's object
becomes one without values, and then what the new plan makes of it, as under `parallelize` (`given/identity.py`), and
the same parts are put on the model anew. Then values move to where they are to lie: parameters, gradients, states.

A rank that held no part of something, of another stage or outside of the old plan, learns from the others what there
is; the lowest rank that had it tells.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from vescale_dtensor import DTensor
from vescale_dtensor.engine import attach, forget_all, local_only, set_reduced_grad
from vescale_trace.stack import users_level
from vescale_trace.values import map_tensors, tensors_in

from .._calls.chain import clear, drop_empty
from .._capture.explain import compiled
from .._experts.structure import find_experts, place_experts
from .._plan.validate import fit
from .._torch_private import _current_graph_task_id
from .._zero.optim import Sharded, bind
from .._zero.sharded_parameter import ShardedParameter
from .._zero.zero import DataParallel
from ..installed._carried_hooks import Hooks, carry_hooks
from ..installed._recipe import Parallelized
from ..plan import Plan, PlanError
from .agreement import check_same_plan
from .apply import Stages, put_on
from .generators import random_states, set_random_states
from .given.absent import empty
from .given.adopt import leave_gone_out, take_gone_in
from .given.aliases import SharedMemoryWarning
from .given.of_stage import check_of_stage
from .join import await_first, is_outside, own_rank, world_size
from .together import gather, together

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Move = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], int]
"""Fills tensors with the values of those of the same names, under the other plan; gives the bytes that came here."""


def reshape(
    model: nn.Module,
    optimizer: Optimizers,
    plan: Plan,
    *,
    move: Move,
    stages: Stages | None = None,
    check_stages: Callable[[Plan, nn.Module, str], None] | None = None,
) -> int:
    """Applies another plan to a parallelized model and its optimizers; see `vescale.reshape`, which supplies `move`,
    `stages`, and `check_stages`, which raises what these would before anything has changed."""
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    held = getattr(model, "_vescale", None)
    if held is not None:
        await_first(held.whole)
    with together("checking the plan"):
        _check(model, held, optimizers, plan, stages)
        with contextlib.nullcontext() if held.absent is None else held.absent.shown():
            fitted = fit(plan, model)
            experts = find_experts(plan, model, fitted.experts)
            placed = place_experts(plan, model, experts, fitted.parameters)
            if plan.pipeline is not None and check_stages is not None:
                check_stages(plan, model, held.device_mesh.device_type)
    check_same_plan(plan, held.device_mesh.device_type)
    was_outside, compiler = is_outside(held.whole), held.compiler
    if not was_outside:
        held.sync.flush()
    with together("reading the states"):
        old = _Held(model, held, optimizers)
    if not was_outside:
        _make_buffers_plain(model)
    told = old.told()
    is_known = held.absent is None and held.whole.world_size >= world_size()  # on all ranks, to all
    everyone = [told] if is_known else gather(told, "telling what ranks hold")
    _take_off(model, held)
    hooks, memory = held.sync.leave()
    united = {name: one for rank in reversed(everyone) for name, one in rank.parameters.items()}  # the lowest's
    with together("sharding the model"):
        for one in optimizers:
            take_gone_in(one)
        for name, parameter in list(model.named_parameters()):
            _release(empty(parameter, name).old)
        if held.absent is not None:
            held.absent.give_back()
            hooks |= held.absent.hooks
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, name in names.items():
            parameter.requires_grad_(united[name].trained)
    absent, _, finish = put_on(plan, model, fitted, experts, placed, held.loss_fn, stages)
    sync = model._vescale.sync
    with together("making the states"):
        for module in model.modules():
            drop_empty(module)
        for parameter, of in hooks.items():
            if absent is None or sync.param_of(parameter) is not None:
                _give_back(parameter, of)
            else:
                absent.hooks[parameter] = of
        for one in optimizers:
            if absent is not None:
                leave_gone_out(one)
            one._parameter_names = {id(parameter): name for parameter, name in names.items()}
            bind(one, sync)
        if was_outside:
            _take_numbers(everyone[0].numbers, optimizers)
        new = _New(model, sync, optimizers, united)
        source, target = {**old.tensors}, {**new.tensors}
        if not is_known:
            _add_buffers(model, everyone, source, target if not is_outside(plan) else {})
    moved = move(source, target)
    new.give_gradients()
    forget_all()
    finish()
    if compiler is not None and not is_outside(plan):
        compiled(model, compiler)
    model._vescale.compiler = compiler
    del old, new, source, target
    if any(not one.expired() for one in memory):
        warnings.warn(
            "reshape: tensors outside of the model lie in the memory that its parameters had under the old plan. They "
            "keep their current values, and that memory. Delete them, or clone() those that you need.",
            SharedMemoryWarning,
            stacklevel=users_level(),
        )
    return moved


class Told(NamedTuple):
    """What there is of a parameter: `states` of each optimizer, with meta tensors in the places of DTensors."""

    trained: bool
    gradient: torch.dtype | None
    states: list[dict[str, Any] | None]


class Rank(NamedTuple):
    """What a rank tells of what it holds. `numbers`: of rank 0, its generators' states and its groups' options."""

    parameters: dict[str, Told]
    buffers: dict[str, Tensor]  # on meta
    lacking: frozenset[str]  # buffers that are others'
    numbers: tuple[list[Tensor], list[list[dict[str, Any]]]] | None


class _Held:
    """Parameters, their gradients and their states, as they lay under the old plan."""

    def __init__(self, model: nn.Module, held: Parallelized, optimizers: Sequence[Any]) -> None:
        self._model, self._absent, self._optimizers = model, held.absent, optimizers
        self._named = dict(model.named_parameters())
        self._states = [one.shown_states() for one in optimizers]
        self.tensors: dict[str, DTensor] = {}
        for name, one in self._named.items():
            self.tensors[_key("parameter", name)] = _at_rest(held.sync.param_of(one))
            if one.grad is not None:
                self.tensors[_key("gradient", name)] = one.grad
            for i, states in enumerate(self._states):
                found = [value for value in tensors_in(states.get(one, {})) if type(value) is DTensor]
                self.tensors |= {_key(i, place, name): value for place, value in enumerate(found)}

    def told(self) -> Rank:
        parameters = {}
        for name, one in self._named.items():
            states = [map_tensors(states[one], _shape_of) if one in states else None for states in self._states]
            parameters[name] = Told(one.requires_grad, None if one.grad is None else one.grad.dtype, states)
        lacking = frozenset() if self._absent is None else self._absent.buffers
        buffers = {name: _shape_of(one, DTensor) for name, one in self._model.named_buffers() if name not in lacking}
        numbers = None
        if own_rank() == 0:
            options = [[{k: v for k, v in group.items() if k != "params"} for group in one.param_groups]
                       for one in self._optimizers]  # fmt: skip
            numbers = random_states(), options
        return Rank(parameters, buffers, lacking, numbers)


class _New:
    """The same under the new plan, without values yet."""

    def __init__(
        self, model: nn.Module, sync: DataParallel, optimizers: Sequence[Any], told: Mapping[str, Told]
    ) -> None:
        named = dict(model.named_parameters())
        self._params = {name: (one, sync.param_of(one)) for name, one in named.items()}
        self._gradients = {name: _gradient(told[name].gradient, param)
                           for name, (_, param) in self._params.items() if told[name].gradient is not None}  # fmt: skip
        self.tensors = {_key("parameter", name): _at_rest(param) for name, (_, param) in self._params.items()}
        self.tensors |= {_key("gradient", name): one for name, one in self._gradients.items()}
        for i, optimizer in enumerate(optimizers):
            states = {one: told[name].states[i] for name, one in named.items() if told[name].states[i] is not None}
            made = optimizer.blank_states(states)
            for name, one in named.items():
                self.tensors |= {_key(i, place, name): value for place, value in enumerate(made.get(one, ()))}

    def give_gradients(self) -> None:
        for name, gradient in self._gradients.items():
            parameter, param = self._params[name]
            if param.hooks is None:
                parameter.grad = gradient
            else:
                set_reduced_grad(parameter, gradient)


def _key(*of: object) -> str:
    return " ".join(map(str, of))


def _shape_of(tensor: Tensor, kind: type = Tensor) -> Tensor:
    """A meta tensor in the place of a DTensor."""
    if type(tensor) is not DTensor and kind is Tensor:
        return tensor
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def _take_numbers(numbers: tuple[list[Tensor], list[list[dict[str, Any]]]], optimizers: Sequence[Any]) -> None:
    """This rank has run nothing since the plan that left it out: its generators, and what schedulers set in groups,
    are those of rank 0."""
    states, groups = numbers
    set_random_states(states)
    for one, theirs in zip(optimizers, groups):
        for group, options in zip(one.param_groups, theirs):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].copy_(value)  # a scheduler may hold it
                else:
                    group[key] = value


def _add_buffers(
    model: nn.Module, everyone: Sequence[Rank], source: dict[str, Tensor], target: dict[str, Tensor]
) -> None:
    """Buffers that some ranks lack come from the lowest rank that has them as they are now."""
    mine = own_rank()
    for name in sorted(frozenset().union(*(rank.lacking for rank in everyone))):
        holder = next(i for i, rank in enumerate(everyone) if name in rank.buffers)
        module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        own, told = module._buffers[leaf], everyone[holder].buffers[name]
        if holder == mine:
            source[_key("buffer", name)] = own
        elif name in everyone[mine].lacking:
            if own.shape != told.shape or own.dtype is not told.dtype:
                own = module._buffers[leaf] = torch.empty_like(told, device=own.device)
            target[_key("buffer", name)] = own


def _take_off(model: nn.Module, held: Parallelized) -> None:
    """Takes all that computes off the model, but for the places of its hooks."""
    if held.leave_stages is not None:
        held.leave_stages()
    for region in () if held.captured is None else held.captured.regions:
        region.leave(region.module.__dict__)
    for module in model.modules():
        clear(module)


def _check(model: nn.Module, held: Parallelized | None, optimizers: list[Any], plan: Plan, stages: Any) -> None:
    elsewhere = [
        ('vescale.save(path, {"model": model, "optimizer": optimizer})', "under the plan of now"),
        ("vescale.load(path, ...) in a job that parallelizes with the new plan", "goes on with the same bits"),
    ]
    if held is None:
        remedies = [("vescale.parallelize(plan, model, optimizer)", "a model's first plan")]
        raise PlanError("reshape", "the model is not parallelized", (), remedies)
    world, needs = world_size(), plan.world_size
    sizes = [f"plan  {needs} ranks {dict(plan.mesh)}", f"world  {world} ranks"]
    if needs > world > 1:  # outside torchrun all axes are of one rank
        raise PlanError("reshape", "the plan is for more ranks than the world has", sizes, elsewhere)
    if plan.pipeline is not None and (stages is None or world != needs):
        raise PlanError("reshape", "a plan with a pipeline is for all ranks of the world", sizes, elsewhere)
    if held.runtime is not None and model.__dict__.get("_call_impl") is not held.runtime:
        remedies = [("leave vescale.metrics, or what else watches its calls, before", "and begin anew after")]
        raise PlanError("reshape", "something stands before the call of the pipeline's model", (), remedies)
    if _current_graph_task_id() != -1:
        remedies = [("reshape between two steps", "what a backward has begun ends under its plan")]
        raise PlanError("reshape", "a backward is running", (), remedies)
    for one in optimizers:
        if not isinstance(one, Sharded) or one._parallel is not held.sync:
            raise PlanError(
                "reshape",
                f"the {type(one).__name__} is not one that parallelize or adopt has made for this model",
                (),
                [("vescale.adopt(model, optimizer) first", "it then knows where its parameters lie")],
            )
        if held.absent is not None and "_whole_groups" not in vars(one):
            raise PlanError(
                "reshape",
                f"the {type(one).__name__} was adopted under a pipeline: it never had other stages' parameters",
                (),
                [("parallelize(plan, model, lambda parameters: ...)", "makes it of the whole model"), *elsewhere],
            )
        if plan.pipeline is not None:
            check_of_stage(one)
    new = [name for name, one in model.named_parameters() if held.sync.param_of(one) is None]
    if new:
        raise PlanError("reshape", "parameters were put into the model after parallelize", new[:4], elsewhere)


def _release(tensor: Tensor) -> None:
    """Lets go of the memory of what a parameter was, which a graph of before may hold: it cannot be run any longer."""
    with local_only():
        increment_version(tensor)
        tensor.data = tensor.data.new_empty(0)


def _at_rest(param: ShardedParameter) -> DTensor:
    value, layout = param.at_rest
    with local_only():
        return attach(value.detach(), layout)


def _gradient(dtype: torch.dtype, param: ShardedParameter) -> DTensor:
    """A gradient without values yet, laid out as a step consumes it."""
    layout = param.gradient_layout
    with local_only():
        return attach(torch.empty(layout.local_shape, dtype=dtype, device=param.full.device), layout)


def _make_buffers_plain(model: nn.Module) -> None:
    """Buffers that forwards replaced by DTensors of the mesh become what they were: tensors that each rank has."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if type(buffer) is DTensor:
                module._buffers[name] = buffer.detach().full_tensor()


def _give_back(parameter: Tensor, hooks: Hooks) -> None:
    """The users' hooks on a parameter's gradient go on. Handles remove them still."""
    of_gradient, when_accumulated = hooks
    if of_gradient:
        with local_only():
            parameter._backward_hooks = of_gradient
    carry_hooks((None, when_accumulated), parameter)
