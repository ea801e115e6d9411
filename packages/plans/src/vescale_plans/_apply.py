"""parallelize: a plan applied to a model and its optimizer, in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vescale_dtensor import PlainTensorError, distribute_tensor, register_function
from vescale_dtensor.engine import Mesh, forget_all, gather_objects, mesh_of

from ._boundary import install_boundary, install_scopes
from ._data_parallel import GradientSync
from ._inputs import RootBorder, checksum
from ._join import join, make_mesh
from ._match import match
from .plan import Plan, PlanError

OptimizerFn = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def parallelize(plan: Plan, model: nn.Module, optimizer_fn: OptimizerFn | None = None) -> tuple[nn.Module, Any]:
    """Shards `model` by `plan`, in place, and makes its optimizer.

    Joins torch.distributed from torchrun's environment when nobody has; outside
    torchrun the same script runs in a world of one. `model.forward`, parameter names,
    `state_dict` names and `print(model)` stay as they were.

    Arguments:
        plan: see `Plan`.
        model: a single-device model, built with the same values on every rank (same seed).
        optimizer_fn: makes the optimizer from an iterable of parameters.

    Returns: the same model, and the optimizer (None without `optimizer_fn`).

    Communicates: one small all-gather of parameter checksums. Raises MeshError,
    PlanError, or PlainTensorError when ranks hold different values.
    """
    if hasattr(model, "_vescale"):
        raise PlanError("parallelize", "the model is parallelized already", (), [("build the model anew", "")])
    join()
    device_mesh = make_mesh(plan)
    mesh = mesh_of(device_mesh)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # both names of a tied one
    placed = match(plan.parameters, names, "parameter", complete=True)
    bounded = match(plan.boundaries, _called_modules(model), "module", complete=False)
    _check_same_values(model, mesh)
    _shard_parameters(plan, model, device_mesh, placed)
    for name, boundary in bounded.items():
        install_boundary(model.get_submodule(name), name, boundary)
    install_scopes(model)
    RootBorder(model, mesh, plan.data_axes)
    sync = GradientSync(model)
    object.__setattr__(model, "_vescale", Parallelized(plan, device_mesh, sync))
    _register_foreign_functions()
    optimizer = None
    if optimizer_fn is not None:
        optimizer = optimizer_fn(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: sync.flush())
        optimizer.register_step_post_hook(lambda *_: forget_all())
    return model, optimizer


class Parallelized:
    """What `parallelize` keeps with a model: the plan, the mesh, the gradient reduction."""

    def __init__(self, plan: Plan, device_mesh, sync: GradientSync) -> None:
        self.plan, self.device_mesh, self.sync = plan, device_mesh, sync


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside leave gradients pending; the first outside, or the step, reduces their sum."""
    with model._vescale.sync.paused():
        yield


def _called_modules(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


def _shard_parameters(plan: Plan, model: nn.Module, device_mesh, placed: dict) -> None:
    """Replaces every parameter by its shard; tied parameters stay tied."""
    shards: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = shards.get(id(parameter))
        if first is not None and plan.placements(placed[first[0]]) != plan.placements(placed[name]):
            raise PlanError(
                "parallelize",
                f"{first[0]!r} and {name!r} are one tied parameter, and the plan places them differently",
                [f"{one}  {dict(placed[one])}" for one in (first[0], name)],
                [("place both alike", "")],
            )
        if first is None:
            placements = plan.placements(placed[name])
            sharded = distribute_tensor(parameter.detach(), device_mesh, placements)
            shard = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            for key, value in parameter.__dict__.items():
                setattr(shard, key, value)
            first = shards[id(parameter)] = (name, shard)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = first[1]


def _check_same_values(model: nn.Module, mesh: Mesh) -> None:
    sums = {name: checksum(parameter) for name, parameter in model.named_parameters()}
    everyone = gather_objects(tuple(sums.items()), mesh)
    for rank, theirs in enumerate(everyone):
        for (name, mine), (_, other) in zip(everyone[0], theirs):
            if mine != other:
                raise PlainTensorError(
                    "parallelize",
                    f"the parameter {name!r} has other values on rank {rank} than on rank 0 of {mesh}",
                    (),
                    [("torch.manual_seed(seed) before the model is built", "the same on every rank")],
                )


def _register_foreign_functions() -> None:
    """Every autograd Function of user code gets an `apply` that is right on DTensors (design section 3, contract 3)."""
    waiting = [torch.autograd.Function]
    while waiting:
        for function in waiting.pop().__subclasses__():
            waiting.append(function)
            if function.__module__.split(".")[0] not in ("torch", "vescale_dtensor", "functorch"):
                register_function(function)
