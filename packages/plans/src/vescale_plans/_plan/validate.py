"""A plan against a model: what each glob decides, and the first thing that does not fit. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from vescale_dtensor import InterleavedShard, Partial, PlacementError, Replicate, Shard
from vescale_dtensor.engine import Mesh, canonical_states

from .fields import PlanFields
from .match import check_names, first_match, match, match_inside, nearest
from .parts import Boundary, Placements, Policy, misfit

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called: nothing can happen at their boundaries."""


@dataclass(frozen=True)
class Fit:
    """A plan's decisions for one model, by name.

    `parameters` holds every name, those of tied parameters too. `checkpointed` are the
    outermost of the modules that are; `regathered` and `offloaded` say for each module what holds inside.
    """

    parameters: Mapping[str, Placements]
    boundaries: Mapping[str, Boundary]
    checkpointed: tuple[str, ...]
    regathered: Mapping[str, bool]
    offloaded: Mapping[str, bool]
    blocks: Mapping[str, int]
    experts: Mapping[str, str]
    policies: Mapping[str, Policy]


def fit(plan: PlanFields, model: nn.Module, *, even: bool = False) -> Fit:
    """See `Plan.validate`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = {name: module for name, module in model.named_modules() if name}
    called = [name for name, module in modules.items() if not isinstance(module, CONTAINERS)]
    check_names([*parameters, *modules])
    placed = match(plan.parameters, parameters, "parameter", complete=True)
    for name, parameter in parameters.items():
        _check_parameter(plan, name, parameter, placed[name], even)
    policies = match_inside(plan.policies, [*modules, *parameters], "module or parameter")
    cut = {name: {a: one for a, one in each.items() if one != Replicate()} for name, each in placed.items()}
    _check_tied("place", parameters, cut)
    _check_tied("treat", parameters, policies)
    if even:
        _check_heads(plan, modules, placed)
    for pattern in plan.boundaries:
        _check_not_a_container(pattern, modules)
    bounded = _bounded(plan, model)
    for name, boundary in bounded.items():
        _check_arguments(name, model.get_submodule(name), boundary)
    checkpointed = tuple(_outermost(match_inside(plan.checkpointing, modules, "module"), called))
    _check_cuts(plan, modules, checkpointed)
    return Fit(
        placed,
        bounded,
        checkpointed,
        match_inside(plan.regather, modules, "module"),
        match_inside(plan.offload_activations, modules, "module"),
        match(plan.blocks, parameters, "parameter", complete=False),
        match(plan.experts, called, "module", complete=False),
        policies,
    )


def _bounded(plan: PlanFields, model: nn.Module) -> dict[str, Boundary]:
    """The boundary of each module, by its first name; any of its names may decide it."""
    every = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    called = [name for name, module in every.items() if not isinstance(module, CONTAINERS)]
    first: dict[nn.Module, str] = {}
    found: dict[str, Boundary] = {}
    for name, boundary in match(plan.boundaries, called, "module", complete=False).items():
        before = first.setdefault(every[name], name)
        if found.setdefault(before, boundary) != boundary:
            raise misfit(
                f"{before!r} and {name!r} are one module, and the plan gives them different boundaries",
                [f"{one}  {each}" for one, each in ((before, found[before]), (name, boundary))],
                [("give both the same boundary", "")],
            )
    return found


def _check_parameter(plan: PlanFields, name: str, parameter: nn.Parameter, placed: Placements, even: bool) -> None:
    """The dims that are named exist, and divide where they must."""
    pattern = first_match(plan.parameters, name)
    where = f"parameters[{pattern!r}] places {name!r}"
    shape = tuple(parameter.shape)
    for axis, placement in placed.items():
        if isinstance(placement, Partial):
            raise misfit(
                f"{where} as a sum not yet reduced over axis {axis!r}, but a parameter is a value",
                [f"{name}  {list(shape)}"],
                [("Replicate()", "alike on all ranks"), ("Shard(dim)", "a part on each")],
            )
    try:
        canonical_states("Plan", plan.placements(placed), Mesh(tuple(plan.mesh.values()), tuple(plan.mesh)), shape)
    except PlacementError as error:
        raise misfit(f"{where}: {error.rule}", error.operands, error.remedies) from None
    if not even:
        return
    sizes = list(shape)
    for axis, placement in placed.items():
        if isinstance(placement, (Shard, InterleavedShard)):
            order = getattr(placement, "order", None) or range(plan.mesh[axis])
            parts = len(order) * getattr(placement, "groups", 1)
            if sizes[placement.dim] % parts:
                raise misfit(
                    f"{where}: dim {placement.dim} of size {sizes[placement.dim]} does not divide by {parts}",
                    [f"{name}  {list(shape)}", f"{axis}  {plan.mesh[axis]} ranks, {placement!r}"],
                    [("even=False", "uneven shards are right, and cost a little more communication")],
                )
            sizes[placement.dim] //= plan.mesh[axis]


def _check_tied(does: str, parameters: Mapping[str, nn.Parameter], decided: Mapping[str, object]) -> None:
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        other = first.setdefault(id(parameter), name)
        if decided.get(other) != decided.get(name):
            raise misfit(
                f"{other!r} and {name!r} are one tied parameter, and the plan {does}s them differently",
                [f"{one}  {decided.get(one)}" for one in (other, name)],
                [(f"{does} both alike", "")],
            )


HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")
HEAD_COUNTS = ("n_head", "num_heads", "num_attention_heads")
WIDTHS = ("n_embd", "embed_dim", "hidden_size")


def _check_heads(plan: PlanFields, modules: Mapping[str, nn.Module], placed: Mapping[str, Placements]) -> None:
    """Projections of an attention whose outputs are cut: every rank gets whole heads."""
    for name, module in modules.items():
        owner = modules.get(name.rpartition(".")[0])
        size = _head_size(owner) if isinstance(module, nn.Linear) and owner is not None else None
        for axis, placement in placed.get(f"{name}.weight", {}).items():
            if size is None or not isinstance(placement, (Shard, InterleavedShard)) or placement.dim != 0:
                continue
            heads, rest = divmod(module.out_features // getattr(placement, "groups", 1), size)
            if rest == 0 and heads % plan.mesh[axis]:
                raise misfit(
                    f"the {heads} heads that {name!r} computes do not divide by the {plan.mesh[axis]} ranks of axis "
                    f"{axis!r}",
                    [f"{name}.weight  {list(module.weight.shape)}, heads of {size}"],
                    [
                        (f"a size of {axis!r} that divides {heads}", ""),
                        ("even=False", "a head that is cut is right, and costs more communication"),
                    ],
                )


def _head_size(owner: nn.Module) -> int | None:
    """Returns the size of an attention module's heads, by the names that models of today use."""
    size, count, width = (
        next((n for name in names if type(n := getattr(owner, name, None)) is int), None)
        for names in (HEAD_SIZES, HEAD_COUNTS, WIDTHS)
    )
    return width // count if size is None and width and count else size


def _check_not_a_container(pattern: str, modules: Mapping[str, nn.Module]) -> None:
    """Refuses boundaries of a container."""
    found = [name for name in modules if fnmatchcase(name, pattern)]
    if found and all(isinstance(modules[name], CONTAINERS) for name in found):
        raise misfit(
            f"boundaries[{pattern!r}] is {found[0]!r}, a {type(modules[found[0]]).__name__}, which is never called",
            (),
            [(f"use '{found[0]}.*'", "the modules in it, and those inside them")],
        )


def _check_arguments(name: str, module: nn.Module, boundary: Boundary) -> None:
    if not boundary.arguments:
        return
    parameters = inspect.signature(module.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for argument in boundary.arguments:
        if argument not in parameters:
            near = nearest(argument, list(parameters)) or list(parameters)
            raise misfit(
                f"the boundary of {name!r} converts an argument {argument!r}, which its forward does not take",
                [f"{type(module).__name__}.forward  ({', '.join(parameters)})"],
                [(f"use {near[0]!r}", "")] if near else (),
            )


def _check_cuts(plan: PlanFields, modules: Mapping[str, nn.Module], checkpointed: tuple[str, ...]) -> None:
    for cut in plan.pipeline.cuts if plan.pipeline is not None else ():
        module = modules.get(cut)
        if module is None:
            near = nearest(cut, list(modules))
            raise misfit(
                f"the pipeline is cut at {cut!r}, which is not a module of the model",
                [f"nearest  {', '.join(near) or 'none'}"],
                [(f"use {near[0]!r}", "")] if near else (),
            )
        if isinstance(module, CONTAINERS):
            remedies = [(f"use '{cut}.{len(module) // 2}'", "a module in it")]
            kind = type(module).__name__
            raise misfit(f"the pipeline is cut at {cut!r}, a {kind}, which is never called", (), remedies)
        around = next((name for name in checkpointed if cut.startswith(f"{name}.")), None)
        if around is not None:
            raise misfit(
                f"the pipeline is cut at {cut!r}, inside {around!r}, which is checkpointed as a whole",
                (),
                [(f"cut at {around!r}", ""), (f'checkpointing={{"{around}": False, ...}}', "")],
            )


def _outermost(decided: Mapping[str, bool], called: list[str]) -> Iterator[str]:
    """The modules for which True is decided, without those inside another."""
    chosen: set[str] = set()
    for name in called:  # parents come before their children
        parts = name.split(".")
        if decided.get(name) and not any(".".join(parts[:i]) in chosen for i in range(1, len(parts))):
            chosen.add(name)
            yield name
