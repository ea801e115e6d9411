"""reshape: another plan for a model that trains, in place.

All that `parallelize` put on the model goes, but for its hooks' places among users' own. Each parameter's object
becomes a shard of the new plan as it became one of the old (`given/identity.py`), but without values, and the same
parts are put on the model anew. Then values move to where they are to lie: parameters, gradients, states.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from vescale_dtensor import DTensor
from vescale_dtensor.engine import attach, forget_all, local_only, set_reduced_grad
from vescale_trace.stack import users_level

from .._calls.chain import clear, drop_empty
from .._capture.explain import compiled
from .._experts.structure import find_experts, place_experts
from .._plan.validate import fit
from .._torch_private import _current_graph_task_id
from .._zero.optim import Sharded, bind
from .._zero.sharded_parameter import ShardedParameter
from .._zero.zero import DataParallel
from ..installed._carried_hooks import Hooks, carry_hooks
from ..installed._recipe import Parallelized, Recipe, install
from ..installed._traffic import watch_first_step
from ..plan import Plan, PlanError
from .agreement import check_same_plan
from .apply import shard_parameters
from .given.aliases import SharedMemoryWarning
from .join import make_mesh
from .together import together

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Tensors = dict[str, DTensor]
Move = Callable[[Mapping[str, Tensors], Mapping[str, Tensors]], int]
"""Fills tensors with the values of those of the same names, under the other plan; gives the bytes that came here."""


def reshape(model: nn.Module, optimizer: Optimizers, plan: Plan, *, move: Move) -> int:
    """Applies another plan to a parallelized model and its optimizers; see `vescale.reshape`, which supplies `move`."""
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    with together("checking the plan"):
        held = _checked(model, optimizers, plan)
        fitted = fit(plan, model)
        experts = find_experts(plan, model, fitted.experts)
        placed = place_experts(plan, model, experts, fitted.parameters)
    check_same_plan(plan, held.device_mesh.device_type)
    device_mesh = make_mesh(plan)
    held.sync.flush()
    with together("reading the states"):
        states = [one.shown_states() for one in optimizers]
    old = _Held(model, held.sync)
    _make_buffers_plain(model)
    for region in () if held.captured is None else held.captured.regions:
        region.leave(region.module.__dict__)
    for module in model.modules():
        clear(module)
    hooks, memory = held.sync.leave()
    with together("sharding the model"):
        for was in shard_parameters(plan, model, device_mesh, placed).values():
            _empty(was.old)
        names = (
            fitted.boundaries, fitted.checkpointed, fitted.regathered, fitted.offloaded, fitted.blocks, fitted.policies,
        )  # fmt: skip
        sync = install(model, Recipe(plan, device_mesh, *names, experts, held.loss_fn)).sync
        for module in model.modules():
            drop_empty(module)
        for parameter, of in hooks.items():
            _give_back(parameter, of)
        for one in optimizers:
            bind(one, sync)
        pairs = [pair for one, shown in zip(optimizers, states) for pair in one.blank_states(shown)]
    moved = old.move_to(sync, pairs, move)
    forget_all()
    watch_first_step(model, plan)
    if held.captured is not None:
        compiled(model, held.captured.backend)
    del old, states, pairs
    if any(not one.expired() for one in memory):
        warnings.warn(
            "reshape: tensors outside of the model lie in the memory that its parameters had under the old plan. They "
            "keep their current values, and that memory. Delete them, or clone() those that you need.",
            SharedMemoryWarning,
            stacklevel=users_level(),
        )
    return moved


class _Held:
    """Parameters and their gradients, as they lay under the old plan."""

    def __init__(self, model: nn.Module, sync: DataParallel) -> None:
        self._named = dict(model.named_parameters())
        self._parameters = {name: _at_rest(sync.param_of(one)) for name, one in self._named.items()}
        self._gradients = {name: one.grad for name, one in self._named.items() if one.grad is not None}

    def move_to(self, sync: DataParallel, states: Sequence[tuple[DTensor, DTensor]], move: Move) -> int:
        """Brings all values to where they lie in `sync`, and those of states, in pairs."""
        params = {name: sync.param_of(parameter) for name, parameter in self._named.items()}
        gradients = {name: _gradient(one, params[name]) for name, one in self._gradients.items()}
        source = {"parameters": self._parameters, "gradients": self._gradients}
        target = {"parameters": {name: _at_rest(param) for name, param in params.items()}, "gradients": gradients}
        source["states"], target["states"] = ({str(i): one for i, one in enumerate(side)} for side in _sides(states))
        kinds = [kind for kind, tensors in source.items() if tensors]
        moved = move({kind: source[kind] for kind in kinds}, {kind: target[kind] for kind in kinds})
        for name, gradient in gradients.items():
            if params[name].hooks is None:
                self._named[name].grad = gradient
            else:
                set_reduced_grad(self._named[name], gradient)
        return moved


def _sides(pairs: Sequence[tuple[DTensor, DTensor]]) -> tuple[list[DTensor], list[DTensor]]:
    return [one for one, _ in pairs], [other for _, other in pairs]


def _checked(model: nn.Module, optimizers: list[Any], plan: Plan) -> Parallelized:
    held = getattr(model, "_vescale", None)
    elsewhere = [
        ('vescale.save(path, {"model": model, "optimizer": optimizer})', "under the plan of now"),
        ("vescale.load(path, ...) in a job that parallelizes with the new plan", "goes on with the same bits"),
    ]
    if held is None:
        remedies = [("vescale.parallelize(plan, model, optimizer)", "a model's first plan")]
        raise PlanError("reshape", "the model is not parallelized", (), remedies)
    if getattr(held, "runtime", None) is not None or plan.pipeline is not None:
        raise PlanError("reshape", "stages of a pipeline are not reshaped in place yet", (), elsewhere)
    world = held.device_mesh.size()
    if world not in (1, plan.world_size):  # outside torchrun all axes are of one rank
        sizes = [f"plan  {plan.world_size} ranks {dict(plan.mesh)}", f"world  {world} ranks"]
        raise PlanError("reshape", "the plan is for another number of ranks than the world has", sizes, elsewhere)
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
    new = [name for name, one in model.named_parameters() if held.sync.param_of(one) is None]
    if new:
        raise PlanError("reshape", "parameters were put into the model after parallelize", new[:4], elsewhere)
    return held


def _empty(tensor: Tensor) -> None:
    """Lets go of the memory of what a parameter was, which a graph of before may hold: it cannot be run any longer."""
    with local_only():
        increment_version(tensor)
        tensor.data = tensor.data.new_empty(0)


def _at_rest(param: ShardedParameter) -> DTensor:
    value, layout = param.at_rest
    with local_only():
        return attach(value.detach(), layout)


def _gradient(like: DTensor, param: ShardedParameter) -> DTensor:
    """A gradient without values yet, laid out as a step consumes it."""
    layout = param.gradient_layout
    with local_only():
        return attach(torch.empty(layout.local_shape, dtype=like.dtype, device=like.device), layout)


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
