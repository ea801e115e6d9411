"""Optimizers that `parallelize` did not make.

    given to `parallelize` in place of a factory    taken over: states are cut, other stages' parameters left out
    made of the model's parameters, before or       `adopt` makes it as `parallelize` would have; without that it steps
    after, and kept                                 on the DTensors themselves, with the model's buckets told; where it
                                                    holds parameters of other stages its step raises
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vescale_dtensor import DTensor
from vescale_dtensor.engine import convert_plain
from vescale_trace.values import parts, refill, with_parts

from ..._plan.parts import PlanError
from ..._torch_private import _current_graph_task_id
from ..._zero.optim import Sharded, wrap
from ..._zero.optim_kinds import MATRIX
from ..._zero.zero import DataParallel

GONE = "_vescale_gone"
"""The attribute of a parameter that this rank does not hold under a pipeline: its name."""
_SHOWN = 4
_parallels: WeakSet[DataParallel] = WeakSet()


def check_given(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises PlanError for an optimizer that holds none of the model's parameters, or is some model's already, or has
    states of full matrices."""
    if isinstance(optimizer, Sharded):
        raise _refused("parallelize", optimizer, "is another parallelized model's parameters")
    _check_held("parallelize", optimizer, set(model.parameters()).__contains__)


def _check_held(operation: str, optimizer: torch.optim.Optimizer, is_own: Callable[[Tensor], bool]) -> None:
    if not any(is_own(one) for group in optimizer.param_groups for one in group["params"]):
        raise _refused(operation, optimizer, "holds none of the model's parameters")
    if type(optimizer) in MATRIX and optimizer.state:
        raise _refused(operation, optimizer, "has states of full matrices, which will each lie on one rank")


def _refused(operation: str, optimizer: torch.optim.Optimizer, what: str) -> PlanError:
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    return PlanError(
        operation,
        f"the {type(optimizer).__name__} {what}",
        [f"optimizer  {held} parameters, {len(optimizer.state)} with a state"],
        [("torch.optim.AdamW(model.parameters(), ...)", "of this model, before its first step")],
    )


def take_over(optimizer: torch.optim.Optimizer, model: nn.Module, sync: DataParallel) -> Any:
    """The optimizer, its parameters shards by now, with states cut as they are, and without what other stages of a
    pipeline have taken along."""
    leave_gone_out(optimizer)
    states = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[parameter] = {key: _cut(value, parameter, sync) for key, value in state.items()}
    return wrap(optimizer, sync, {id(p): name for name, p in model.named_parameters()})


def adopt(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Treats `optimizer`, which was created from a parallelized model's parameters, as if `parallelize` had created it:
    it steps on this rank's shards, and `vescale.save` can store its states. For frameworks that create the optimizer
    themselves.

    Under a pipeline, what `model.parameters()` has for other stages' is left out of the groups, as `parallelize` does.

    Returns the same object. Raises PlanError for a model that is not parallelized, an optimizer of other parameters, or
    one that has states of full matrices. Cost: existing states are sharded; nothing before the first step.
    """
    parallel = getattr(model, "_vescale", None)
    if parallel is None:
        remedies = [("vescale.parallelize(plan, model, optimizer)", "both at once")]
        raise PlanError("adopt", "the model is not parallelized", (), remedies)
    if isinstance(optimizer, Sharded) and optimizer._parallel is parallel.sync:
        return optimizer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    elsewhere = {id(parameter) for parameter in model.parameters()} - names.keys()
    _check_held("adopt", optimizer, lambda one: id(one) in elsewhere or parallel.sync.param_of(one) is not None)
    if elsewhere:
        leave_out(optimizer, lambda one: id(one) in elsewhere)
    return wrap(optimizer, parallel.sync, names)


def leave_out(optimizer: Any, gone: Callable[[Tensor], bool]) -> None:
    """Takes parameters off an optimizer: off its groups, its states, and what it keeps beside them, as LBFGS does."""
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if not gone(parameter)]
    states = getattr(optimizer, "state", {})
    for parameter in [one for one in states if isinstance(one, Tensor) and gone(one)]:
        del states[parameter]
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state"):
            vars(optimizer)[name] = _left(value, gone)


def leave_gone_out(optimizer: Any) -> None:
    """Takes parameters that are elsewhere off an optimizer, until `take_gone_in`."""
    whole = [list(group["params"]) for group in optimizer.param_groups]
    leave_out(optimizer, is_gone)
    optimizer._whole_groups = whole


def take_gone_in(optimizer: Any) -> None:
    """The optimizer's groups have those parameters again, in the order that they had."""
    for group, whole in zip(optimizer.param_groups, optimizer.__dict__.pop("_whole_groups", ())):
        here, known = set(group["params"]), set(whole)
        group["params"] = [one for one in whole if one in here or is_gone(one)] + [
            one for one in group["params"] if one not in known
        ]


def is_gone(parameter: Tensor) -> bool:
    """True if another stage of a pipeline owns the parameter."""
    return GONE in parameter.__dict__


def watch(sync: DataParallel) -> None:
    """Watches, from now on, the steps of optimizers that hold the buckets' parameters, or those that they came from."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before))
        _hooks.append(register_optimizer_step_post_hook(_after))
    _parallels.add(sync)


_hooks: list[Any] = []


def _left(value: Any, gone: Callable[[Tensor], bool]) -> Any:
    """Returns an optimizer's values outside its groups, without those that are gone."""

    inside = None if isinstance(value, Tensor) else parts(value)
    if inside is None or isinstance(value, slice):
        return value
    left = {key: _left(one, gone) for key, one in inside.items() if not (isinstance(one, Tensor) and gone(one))}
    if isinstance(value, tuple):
        return with_parts(value, left) if len(left) == len(value) else tuple(left.values())
    refill(value, left)  # the same object, which others may hold
    return value


def _cut(value: Any, parameter: nn.Parameter, sync: DataParallel) -> Any:
    """A state of one device as the one of the parameter's shard."""
    param = sync.param_of(parameter)
    if param is None or not isinstance(value, Tensor) or not value.ndim:
        return value
    if tuple(value.shape) != param.full_layout.shape:
        return value
    return convert_plain(value.detach(), param.full_layout.mesh, param.gradient_layout, "parallelize")


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, Sharded):
        return
    gone = [name for group in optimizer.param_groups for p in group["params"] if (name := p.__dict__.get(GONE))]
    if gone:
        names = ", ".join(gone[:_SHOWN]) + (", ..." if len(gone) > _SHOWN else "")
        raise PlanError(
            f"{type(optimizer).__name__}.step",
            f"{len(gone)} of its parameters are other stages' of the pipeline: it was made before parallelize, and a "
            "step would leave them out",
            [f"parameters  {names}"],
            [
                ("parallelize(plan, model, optimizer)", "takes the optimizer over"),
                ("parallelize(plan, model, lambda parameters: torch.optim.AdamW(parameters, ...))", "makes one"),
            ],
        )
    for sync in _held_by(optimizer):
        sync.flush()


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, Sharded):
        for sync in _held_by(optimizer):
            sync.updated()


def _held_by(optimizer: torch.optim.Optimizer) -> list[DataParallel]:
    """Returns the owners of the optimizer's parameters that nobody adopted; in the same order on all ranks. None of
    those that are amid a backward, whose hook the step is: what it needs and changes is seen to around the hooks, and
    where nothing is reduced (experts without data parallelism) the hook is autograd's own, and the gradient this
    rank's."""
    found: list[DataParallel] = []
    amid = _current_graph_task_id() != -1
    if _parallels:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if type(parameter) is DTensor or isinstance(parameter, DTensor):
                    found += [one for one in _parallels if one not in found and _concerns(one, parameter, amid)]
    return [one for one in found if not one.runs_hooks]


def _concerns(sync: DataParallel, parameter: Tensor, amid: bool) -> bool:
    param = sync.param_of(parameter)
    return param is not None and not (amid and param.hooks is None and not param.is_separate)
