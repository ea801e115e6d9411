"""The part of a plan that is done to one model's modules, by name: a value, so that a copy of the model, or of a part
of it, can have the same done to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor.engine import Mesh, mesh_of, pin

from .._apply.balance import balance_of
from .._apply.boundary import install_boundary, install_scopes
from .._apply.decoding import leave_caches_out
from .._apply.given.adopt import watch
from .._apply.given.wrappers import refuse_wrappers
from .._apply.inputs import RootBoundary, cuts_of
from .._apply.loss import LossBoundary, LossFn
from .._apply.masks import MaskBoundary
from .._experts.experts import ExpertsBoundary
from .._experts.lists import ListBoundary
from .._experts.structure import Experts
from .._plan.least import Reads, cutting_axes, least_collectives, open_sums
from .._plan.validate import Fit
from .._recompute.host import Host
from .._recompute.recompute import install_recompute
from .._zero.sharded_parameter import Sharing
from .._zero.zero import DataParallel
from ..plan import Plan, PlanError, Policy


@dataclass(frozen=True)
class Recipe:
    """Recipe for a model whose parameters are on the mesh; names are those of its modules."""

    plan: Plan
    device_mesh: DeviceMesh
    fit: Fit
    experts: Experts
    loss_fn: LossFn | None = None

    def below(self, name: str) -> Recipe:
        """Returns the recipe of one of the model's modules, as a model of its own."""
        if not name:
            return self
        experts = Experts(_below(self.experts.stacked, name), _below(self.experts.listed, name), self.experts.axis)
        said = self.fit
        fit = replace(
            said, boundaries=_below(said.boundaries, name), regathered=_inside(said.regathered, name),
            offloaded=_inside(said.offloaded, name), blocks=_below(said.blocks, name),
            policies=_below(said.policies, name), checkpointed=tuple(_below(dict.fromkeys(said.checkpointed), name)),
        )  # fmt: skip
        return replace(self, fit=fit, experts=experts, loss_fn=None)

    def among(self, model: nn.Module) -> Recipe:
        """Returns the recipe of those of the modules that the model has still."""
        names = {name for name, _ in model.named_modules()}

        def kept(named: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in named.items() if name in names}

        said = self.fit
        fit = replace(
            said, boundaries=kept(said.boundaries), checkpointed=tuple(kept(dict.fromkeys(said.checkpointed))),
            regathered=kept(said.regathered), offloaded=kept(said.offloaded),
        )  # fmt: skip
        experts = Experts(kept(self.experts.stacked), kept(self.experts.listed), self.experts.axis)
        return replace(self, fit=fit, experts=experts)


def _below(named: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the entries of a module and those inside it, by their names in it."""
    return {one.removeprefix(name).removeprefix("."): value for one, value in named.items()
            if f"{one}.".startswith(f"{name}.")}  # fmt: skip


def _inside(decided: Mapping[str, bool], name: str) -> dict[str, bool]:
    """Returns the decisions for a module and those inside it, by their names in it."""
    around = [decided[one] for one in decided if f"{name}.".startswith(f"{one}.")]
    return ({"": around[-1]} if around else {}) | _below(decided, name)


class Parallelized:
    """State of a parallelized model: the plan, the mesh, its buffers, the loss, the experts, and where its activations
    are, if they are offloaded."""

    def __init__(
        self, recipe: Recipe, sync: DataParallel, experts: list[ExpertsBoundary | ListBoundary], host: Host | None,
        inputs: RootBoundary | None,
    ) -> None:  # fmt: skip
        self.recipe, self.plan, self.device_mesh, self.loss_fn = recipe, recipe.plan, recipe.device_mesh, recipe.loss_fn
        self.sync, self.experts, self.host, self.inputs = sync, experts, host, inputs
        self.captured: Any = None  # `Regions` that are compiled
        self.compiler: str | None = None  # the backend that makes them
        self.whole = recipe.plan  # over all stages
        self.absent: Any = None  # `Absent`, where this rank does not hold all of the model
        self.runtime: Any = None  # of a pipeline
        self.leave_stages: Callable[[], None] | None = None  # ends it, and takes it off the model

    def least(self, model: nn.Module, calls: Mapping[str, int], reads: Reads, backward: bool) -> int:
        """Collectives that the plan's cut weights need for these calls of modules, of what they read; `Trace.least`."""
        return least_collectives(self.plan, model, calls, reads, backward=backward)

    def open_sums(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Module -> axes over which it gives a sum of parts that no boundary makes whole; `Trace.advice`."""
        return open_sums(self.plan, model)


def install(model: nn.Module, recipe: Recipe) -> Parallelized:
    """Puts all of it on the model, whose parameters are on the mesh already."""
    mesh, plan = mesh_of(recipe.device_mesh), recipe.plan
    fit = recipe.fit
    host = install_recompute(model, fit.checkpointed, fit.regathered, fit.offloaded)
    leave_caches_out(model)
    if recipe.device_mesh.size() > 1:  # on one rank all layouts are one: nothing is converted
        for name, boundary in fit.boundaries.items():
            install_boundary(model.get_submodule(name), name, boundary)
        install_scopes(model, [mesh.axis(name) for name in cutting_axes(plan)])
    boundaries = _of_experts(plan, model, recipe.experts, mesh)
    if recipe.loss_fn is not None:
        LossBoundary(model, recipe.loss_fn)
    balance = balance_of(plan, mesh, model)
    inputs = RootBoundary(model, mesh, cuts_of(plan, balance))
    if plan.context_axis is not None:
        pin(mesh, mesh.axis(plan.context_axis), plan.context)
        MaskBoundary(model, mesh, mesh.axis(plan.context_axis), balance, describes=plan.pipeline is None)
    lists = [model.get_submodule(name) for name in recipe.experts.listed]
    own = {name: _sharing(plan, mesh, policy) for name, policy in fit.policies.items()}
    sync = DataParallel(model, _sharing(plan, mesh, Policy()), fit.blocks, lists, own)
    for experts in boundaries:
        _refuse_lowered(experts.name, model.get_submodule(experts.name), sync, mesh.axis(recipe.experts.axis))
    made = Parallelized(recipe, sync, boundaries, host, inputs)
    object.__setattr__(model, "_vescale", made)
    watch(made.sync)
    refuse_wrappers(model)
    return made


def _of_experts(plan: Plan, model: nn.Module, experts: Experts, mesh: Mesh) -> list[ExpertsBoundary | ListBoundary]:
    found: list[ExpertsBoundary | ListBoundary] = []
    for name, stack in experts.stacked.items():
        module, said = model.get_submodule(name), plan.expert_axis is not None
        more = {"block": _owner(model, name), "capacity": plan.capacity_factor, "needed": said}
        found.append(ExpertsBoundary(module, name, mesh, experts.axis, stack, **more))
    for name, count in experts.listed.items():
        axis = mesh.axis(experts.axis)
        states = [one.mesh_layout.states[axis] for one in model.get_submodule(name).parameters()]
        # A plan may keep a list's experts whole: its block then computes as any module does. One rank has all.
        if name and (mesh.sizes[axis] == 1 or all(state.is_sharded for state in states)):
            found.append(ListBoundary(_owner(model, name), name, count, mesh, experts.axis))
    return found


def _refuse_lowered(name: str, experts: nn.Module, sync: DataParallel, axis: int) -> None:
    """Raises PlanError for linear layers of experts that are to multiply otherwise: experts compute on plain tensors,
    whose scales would be those of a rank's rows. What a stack has of each expert is no weight of a linear layer."""
    for inner, parameter in experts.named_parameters():
        param, states = sync.param_of(parameter), parameter.mesh_layout.states
        is_stack = states[axis].is_sharded and not isinstance(experts, nn.ModuleList)
        products = param and param.shown[True].products
        if products and parameter.ndim == 2 and not is_stack:
            rule = f"{name}.{inner} is to multiply in {products}, and spread experts compute on plain tensors"
            remedies = [(f'policies={{"{name}": Policy(precision=Precision(...))}}', "one without products")]
            raise PlanError("Precision", rule, (), remedies)


def _owner(model: nn.Module, name: str) -> nn.Module | None:
    """The module of which the one of that name is a child; None for the model."""
    return model.get_submodule(name.rpartition(".")[0]) if name else None


def _sharing(plan: Plan, mesh: Mesh, policy: Policy) -> Sharing:
    """Returns the plan's way of sharing buffers over the mesh, of what a policy is for."""
    zero, prefetch = (
        every if own is None else own for own, every in ((policy.zero, plan.zero), (policy.prefetch, plan.prefetch))
    )
    lead = mesh.axis(plan.zero_axis) if plan.zero_axis is not None else None
    precision = policy.precision or plan.precision
    return Sharing(mesh, zero, lead, precision, plan.offload, prefetch, plan.ahead_bytes, plan.sums)
