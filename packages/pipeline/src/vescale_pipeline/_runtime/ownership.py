"""Assigns parameters to stages by names alone: before any batch is known, since the optimizer needs it.

Modules are taken in the order in which they are registered; the dry run of the first
call checks that the forward calls them so. Where it does not, a plan says who owns a
module. A parameter under two names is tied; one of a container that a cut lies in (a
class token of the root) is owned by every stage.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .._errors import PipelineError
from .._trace.placeholder import Placeholder, change_places, weight_placeholder


@dataclass(frozen=True)
class Ownership:
    """Stages of every parameter and of every buffer, by its first name; and the cuts, by the modules' first names.
    `has_frozen`, `has_trained`: whether any parameter of the model was not to be trained, and whether any was."""

    cuts: tuple[str, ...]
    stages: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]
    has_frozen: bool = False
    has_trained: bool = True

    def names_of(self, stage: int) -> list[str]:
        """The parameters that a stage owns."""
        return [name for name, stages in self.stages.items() if stage in stages]


def ownership(model: nn.Module, cuts: Sequence[str], owners: Mapping[str, int] | None = None) -> Ownership:
    """See the module. Raises PipelineError for a name that is no module's, and for cuts out of order.

    Arguments:
        owners: module -> the stage of what is in it, whenever it was registered.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    places = _places(cuts, names)
    containers = {"", *(cut[:i] for cut in cuts for i, letter in enumerate(cut) if letter == ".")}
    everywhere = tuple(range(len(cuts) + 1))
    parameters: dict[int, tuple[str, set[int]]] = {}
    buffers: dict[int, tuple[str, set[int]]] = {}
    for name in owners or ():
        _check_name("the owned module", name, names)
    for place, (name, module) in enumerate(model.named_modules(remove_duplicate=False)):
        own = max((one for one in owners or () if f"{name}.".startswith(f"{one}.")), key=len, default=None)
        stage = bisect_right(places, place) if own is None else owners[own]
        for found, tensors in ((parameters, module._parameters), (buffers, module._buffers)):
            for leaf, tensor in tensors.items():
                if tensor is not None:
                    full = f"{name}.{leaf}" if name else leaf
                    stages = found.setdefault(id(tensor), (full, set()))[1]
                    stages.update(everywhere if name in containers else [stage])
    first_name = {id(module): name for name, module in model.named_modules()}
    modules = dict(model.named_modules(remove_duplicate=False))
    return Ownership(
        tuple(first_name[id(modules[cut])] for cut in cuts),
        *({name: tuple(sorted(stages)) for name, stages in found.values()} for found in (parameters, buffers)),
        has_frozen=not all(parameter.requires_grad for parameter in model.parameters()),
        has_trained=any(parameter.requires_grad for parameter in model.parameters()),
    )


def release(model: nn.Module, owned: Collection[str], device: torch.device | None = None) -> None:
    """Takes all parameters but the `owned` ones off the model; placeholders stand where they were.

    A parameter's object becomes the placeholder, so that whoever else holds it does not compute with what it was.
    `device` is where the pipeline's parameters will lie: so says, too, what stands for those of a model on the host.
    """
    keep = {id(parameter) for name, parameter in model.named_parameters() if name in owned}
    gone = {parameter: name for name, parameter in model.named_parameters() if name not in owned}
    held = [(module, *one) for module in model.modules() for one in module._parameters.items() if one[1] is not None]
    for parameter, name in gone.items():
        change_places(parameter, weight_placeholder(parameter, name, device))
    for module, leaf, parameter in held:
        if id(parameter) not in keep:
            del module._parameters[leaf]
            module.__dict__[leaf] = parameter


def disown_buffers(model: nn.Module, owned: Ownership, stages: Collection[int]) -> None:
    """Takes the buffers of other stages off what the model saves: only the stage that computes keeps them current."""
    for module_name, module in model.named_modules():
        for leaf in module._buffers:
            homes = owned.buffers.get(f"{module_name}.{leaf}" if module_name else leaf, stages)
            if not set(homes) & set(stages):
                module._non_persistent_buffers_set.add(leaf)


def is_elsewhere(value: object) -> bool:
    """True if an attribute of a module is a parameter that another stage owns."""
    return type(value) is Placeholder


def holds_elsewhere(module: nn.Module) -> bool:
    """True if another stage owns a parameter of the module, or of a module within it."""
    return any(is_elsewhere(value) for one in module.modules() for value in one.__dict__.values())


def named_everywhere(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """`module.named_parameters()` with what stands for those of other stages, each in the order of one device."""
    seen: set[int] = set()
    for name, one in module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate):
        if one is not module and not recurse:
            return
        elsewhere = {leaf: value for leaf, value in one.__dict__.items() if is_elsewhere(value)}
        for leaf, value in (*one._parameters.items(), *elsewhere.items()):
            if value is not None and not (remove_duplicate and id(value) in seen):
                seen.add(id(value))
                yield f"{name}.{leaf}" if name else leaf, value


def _check_name(what: str, name: str, names: list[str]) -> None:
    if name not in names or not name:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
        raise PipelineError(
            "pipeline",
            f"{what} {name!r} is not a module of the model",
            [f"nearest  {', '.join(near) or 'none'}"],
            [(f"use {near[0]!r}" if near else "name a module of model.named_modules()", "")],
        )


def _places(cuts: Sequence[str], names: list[str]) -> list[int]:
    places = []
    for cut in cuts:
        _check_name("the cut", cut, names)
        places.append(names.index(cut))
    for before, after, left, right in zip(cuts, cuts[1:], places, places[1:]):
        if left >= right:
            raise PipelineError(
                "pipeline",
                f"the cut {after!r} does not come after the cut {before!r}",
                [f"cuts  {', '.join(cuts)}"],
                [("order the cuts like the model's modules", "each begins a stage")],
            )
    return places
