"""Optimizers that `parallelize` did not make.

    given to `parallelize` in place of a factory    taken over: the shards take the parameters' places, states are cut
    made of the parameters before it, and kept      its step raises: what it holds is no part of the model any more
    made of the model's parameters after it         `adopt` makes it as `parallelize` would have; without that it steps
                                                    on the DTensors themselves, with the model's buffers told
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vescale_dtensor import DTensor
from vescale_dtensor.engine import convert_plain

from .._plan.parts import PlanError
from .._torch_private import _current_graph_task_id
from .._zero.optim import Sharded, wrap
from .._zero.optim_kinds import MATRIX
from .._zero.zero import DataParallel

MOVED = "_vescale_moved"
"""The attribute of a parameter that says what became of it."""
_SHOWN = 4
_parallels: WeakSet[DataParallel] = WeakSet()


def check_given(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises PlanError for an optimizer that holds none of the model's parameters, or is some model's already, or has
    states of whole matrices."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = set(model.parameters())
    if isinstance(optimizer, Sharded) or not any(parameter in own for parameter in held):
        what = "is another parallelized model's" if isinstance(optimizer, Sharded) else "holds none of the model's"
        raise PlanError(
            "parallelize",
            f"the {type(optimizer).__name__} that it is given {what} parameters",
            [f"optimizer  {len(held)} parameters", f"model      {len(own)} parameters"],
            [("lambda parameters: torch.optim.AdamW(parameters, ...)", "called with this model's parameters")],
        )
    if type(optimizer) in MATRIX and optimizer.state:
        raise PlanError(
            "parallelize",
            f"the {type(optimizer).__name__} that it is given has states, of matrices that each lie on one rank later",
            [f"optimizer  {len(optimizer.state)} of {len(held)} parameters with a state"],
            [("parallelize before the first step, then vescale.load", "a checkpoint's states go where they belong")],
        )


def take_over(optimizer: torch.optim.Optimizer, model: nn.Module, sync: DataParallel) -> Any:
    """The optimizer, with the model's shards in the places of the parameters that it was made of, and states cut.

    What other stages of a pipeline have taken along is left out.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gone = {parameter for parameter in held if (mark := _Mark.of(parameter)) is not None and mark.shard is None}
    states = {_successor(parameter): state for parameter, state in optimizer.state.items() if parameter not in gone}
    for group in optimizer.param_groups:
        group["params"] = [_successor(parameter) for parameter in group["params"] if parameter not in gone]
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state"):
            vars(optimizer)[name] = _renewed(value, gone)  # LBFGS keeps its parameters apart
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[parameter] = {key: _cut(value, parameter, sync) for key, value in state.items()}
    return wrap(optimizer, sync, {id(p): name for name, p in model.named_parameters()})


def holds_moved(optimizer: Any) -> bool:
    """Whether it is an optimizer that holds parameters of before `parallelize`, be they this rank's or not."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    return any(_Mark.of(parameter) is not None for group in optimizer.param_groups for parameter in group["params"])


def adopt(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Makes `optimizer`, made of a parallelized model's parameters, what `parallelize` makes of its own: it steps on
    this rank's parts, and `vescale.save` knows its states. For frameworks that make the optimizer themselves.

    Returns the same object. Raises PlanError for a model that is not parallelized, an optimizer of other parameters,
    or one that has states of whole matrices. Cost: states that are there already are cut, before the first step none.
    """
    parallel = getattr(model, "_vescale", None)
    if parallel is None:
        remedies = [("vescale.parallelize(plan, model, optimizer)", "both at once")]
        raise PlanError("adopt", "the model is not parallelized", (), remedies)
    if isinstance(optimizer, Sharded) and optimizer._parallel is parallel.sync:
        return optimizer
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = type(optimizer) in MATRIX and optimizer.state
    if whole or all(parallel.sync.slot_of(parameter) is None for parameter in held):
        what = "has states of whole matrices" if whole else "holds none of the model's parameters"
        raise PlanError(
            "adopt",
            f"the {type(optimizer).__name__} {what}",
            [f"optimizer  {len(held)} parameters, {len(optimizer.state)} with a state"],
            [("adopt(model, torch.optim.AdamW(model.parameters(), ...))", "before its first step")],
        )
    return wrap(optimizer, parallel.sync, {id(p): name for name, p in model.named_parameters()})


def moved(parameter: nn.Parameter, name: str, shard: nn.Parameter | None) -> None:
    """Notes what became of a parameter; None where this rank holds nothing of it, under a pipeline."""
    parameter.__dict__[MOVED] = _Mark(name, shard)


def watch(sync: DataParallel) -> None:
    """From now on steps of optimizers that hold the buffers' parameters, or those that they came from, are seen."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before))
        _hooks.append(register_optimizer_step_post_hook(_after))
    _parallels.add(sync)


_hooks: list[Any] = []


class _Mark:
    """What became of a parameter. It does not travel with copies."""

    def __init__(self, name: str, shard: nn.Parameter | None) -> None:
        self.name, self.shard = name, shard

    @staticmethod
    def of(parameter: Tensor) -> _Mark | None:
        return parameter.__dict__.get(MOVED)

    def __deepcopy__(self, memo: dict) -> None:
        return None


def _successor(parameter: nn.Parameter) -> nn.Parameter:
    mark = _Mark.of(parameter)
    return parameter if mark is None or mark.shard is None else mark.shard


def _renewed(value: Any, gone: set[nn.Parameter]) -> Any:
    """What an optimizer keeps beside its groups, with the shards in the places of the parameters."""
    if isinstance(value, nn.Parameter):
        return _successor(value)
    if type(value) is dict:
        pairs = {_renewed(key, gone): _renewed(one, gone) for key, one in value.items()}
        value.clear()
        value.update(pairs)  # the same object, which others may hold
    elif type(value) in (list, tuple):
        items = [_renewed(one, gone) for one in value if not (isinstance(one, nn.Parameter) and one in gone)]
        if type(value) is tuple:
            return tuple(items)
        value[:] = items
    return value


def _cut(value: Any, parameter: nn.Parameter, sync: DataParallel) -> Any:
    """A state of one device as the one of the parameter's shard."""
    slot = sync.slot_of(parameter)
    if slot is None or not isinstance(value, Tensor) or tuple(value.shape) != slot.full_layout.shape or not value.ndim:
        return value
    return convert_plain(value.detach(), slot.full_layout.mesh, slot.gradient_layout, "parallelize")


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, Sharded):
        return
    marks = [mark for group in optimizer.param_groups for p in group["params"] if (mark := _Mark.of(p))]
    if marks:
        names = ", ".join(mark.name for mark in marks[:_SHOWN]) + (", ..." if len(marks) > _SHOWN else "")
        raise PlanError(
            f"{type(optimizer).__name__}.step",
            f"{len(marks)} of its parameters are no part of a model any more: it was made before parallelize, which "
            "put shards in their places, and a step would train nothing",
            [f"parameters  {names}"],
            [
                ("parallelize(plan, model, optimizer)", "takes the optimizer over"),
                ("parallelize(plan, model, lambda parameters: torch.optim.AdamW(parameters, ...))", "makes one"),
            ],
        )
    for sync in _held_by(optimizer):
        sync.flush()
        sync.rest()


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, Sharded):
        for sync in _held_by(optimizer):
            sync.updated()


def _held_by(optimizer: torch.optim.Optimizer) -> list[DataParallel]:
    """Whose parameters the optimizer steps on, which nobody adopted; in the same order on all ranks. None of those
    that are amid a backward, whose hook the step is: what it needs and changes is seen to around the hooks, and where
    nothing is reduced (experts without data parallelism) the hook is autograd's own, and the gradient this rank's."""
    found: list[DataParallel] = []
    amid = _current_graph_task_id() != -1
    if _parallels:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if type(parameter) is DTensor or isinstance(parameter, DTensor):
                    found += [one for one in _parallels if one not in found and _concerns(one, parameter, amid)]
    return [one for one in found if not one.tells]


def _concerns(sync: DataParallel, parameter: Tensor, amid: bool) -> bool:
    slot = sync.slot_of(parameter)
    return slot is not None and not (amid and slot.hooks is None and not slot.is_separate)
