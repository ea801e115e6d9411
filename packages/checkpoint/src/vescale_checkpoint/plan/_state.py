"""Turns what the user saves into named tensors and JSON values.

Names follow the path in the state and then the object's own names:
"model.transformer.wte.weight". A tensor of an optimizer's state has the name of its
parameter: "optimizer.state.transformer.wte.weight.exp_avg"; so it is found again
under any plan, and follows the parameter when that is renamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_trace.values import leaves

from .._errors import UnsafeError
from ..format._text import shown
from ..format._values import MOST_LEVELS, NAMES_KEY, encode

PLAN_KEY = "plan"  # of the state: stored for information, never loaded


@dataclass
class Contents:
    """A state taken apart: tensors by name, further names of tied ones, and everything else as JSON."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    values: Any = None
    plan: Any = None

    def add(self, name: str, tensor: Tensor) -> str:
        if name in self.tensors:
            raise UnsafeError("save", f"two tensors of the state have the name {name!r}", (), [("rename a key", "")])
        self.tensors[name] = tensor
        return name


def contents_of(state: Mapping[str, Any]) -> Contents:
    """Everything in `state`. Tensors are the state's own, not copies.

    Raises UnsafeError for what cannot be stored. No communication.
    """
    if odd := [key for key in state if type(key) is not str]:
        raise UnsafeError("save", f"the key {shown(odd[0])} of the state is not text")
    try:
        contents, names = Contents(), parameter_names(state)
        contents.plan = plan_text(state.get(PLAN_KEY))
        contents.values = {
            key: _item(key, value, contents, names) for key, value in state.items() if key != PLAN_KEY
        }  # fmt: skip
        return contents
    except RecursionError as error:
        raise UnsafeError("save", "the state is nested too deep, or holds itself") from error


def _item(path: str, value: Any, contents: Contents, names: Mapping[int, str], level: int = 0) -> Any:
    """The JSON of one entry; containers are entered, so that models may stand anywhere in them."""
    if isinstance(value, Tensor):
        return encode(value, path, contents.add)
    if isinstance(value, nn.Module):
        return {"$module": _module(path, value, contents)}
    if is_optimizer(value):
        return {"$optimizer": _optimizer(path, value, contents, names)}
    if hasattr(value, "state_dict"):
        return {"$state": encode(value.state_dict(), path, contents.add)}
    if level > MOST_LEVELS:
        return encode(value, path, contents.add, level)  # raises, where it is a container
    if type(value) is dict and all(type(key) is str and key[:1] != "$" for key in value):
        return {key: _item(f"{path}.{key}", item, contents, names, level + 1) for key, item in value.items()}
    if type(value) is list:
        return [_item(f"{path}.{i}", item, contents, names, level + 1) for i, item in enumerate(value)]
    return encode(value, path, contents.add, level)


def _module(path: str, module: nn.Module, contents: Contents) -> dict[str, Any]:
    extra, first = {}, first_names(module)
    for name, value in module.state_dict().items():
        full = f"{path}.{name}"
        if not isinstance(value, Tensor):
            extra[name] = encode(value, full, contents.add)
        elif first.get(name, name) != name:
            contents.tied.setdefault(f"{path}.{first[name]}", []).append(full)
        else:
            contents.add(full, value)
    return extra


def first_names(module: nn.Module) -> dict[str, str]:
    """Name -> the first name of the same parameter or buffer: another one for tied ones."""
    seen: dict[int, str] = {}
    found = {}
    for kind in (module.named_parameters, module.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            found[name] = seen.setdefault(id(tensor), name)
    return found


def _optimizer(path: str, optimizer: Any, contents: Contents, names: Mapping[int, str]) -> dict[str, Any]:
    found = optimizer_parts(optimizer, names, materialize=False)
    state: dict[str, dict[str, Any]] = {}
    for name, entries in found["state"].items():
        for key, value in entries.items():
            if not isinstance(key, str) or "." in key:
                raise UnsafeError("save", f"the optimizer's state of {name!r} has the key {key!r}: text without a dot")
            encoded = encode(value, f"{path}.state.{name}.{key}", contents.add)
            if not isinstance(value, Tensor):
                state.setdefault(name, {})[key] = encoded
    groups = []
    for i, group in enumerate(found["param_groups"]):
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append(
            {"params": {NAMES_KEY: list(group["params"])}, "options": encode(rest, f"{path}.groups.{i}", contents.add)}
        )
    return {"state": state, "groups": groups}


def is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer) or hasattr(value, "sharded_state_dict")


_OF_SCHEDULERS = frozenset(("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"))
"""Options that torch's schedulers put into a group."""


def another_kind(options: Mapping[str, Any], optimizer: Any, group: Mapping[str, Any]) -> str | None:
    """Says how a saved group's options show another kind of optimizer: each has some that the other lacks. Only one of
    them has more after another release of torch, or with a scheduler."""
    defaults = getattr(optimizer, "defaults", {}).keys()
    theirs = sorted(options.keys() - group.keys() - defaults - _OF_SCHEDULERS)
    mine = sorted(defaults - options.keys() - _OF_SCHEDULERS)
    return f"has {', '.join(mine)}, saved with {', '.join(theirs)}" if theirs and mine else None


def optimizer_parts(optimizer: Any, names: Mapping[int, str], *, materialize: bool) -> dict[str, Any]:
    """{"state": {parameter name: {key: value}}, "param_groups": [{"params": names, ...}]}, values not copied."""
    if hasattr(optimizer, "sharded_state_dict"):
        return optimizer.sharded_state_dict(materialize=materialize)
    named = {id(p): name for name, p in named_parameters_of(optimizer, names)}
    return {
        "state": {named[id(p)]: dict(entries) for p, entries in optimizer.state.items() if id(p) in named},
        "param_groups": [
            {**group, "params": [named[id(p)] for p in group["params"]]} for group in optimizer.param_groups
        ],
    }


def named_parameters_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    """Its parameters by their model's names; by place where no model of the state has them."""
    place = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names.get(id(parameter), f"#{place}"), parameter
            place += 1


def parameter_names(state: Any) -> dict[int, str]:
    """id of each parameter of the modules in `state` -> its (first) name there."""
    found: dict[int, str] = {}
    modules = [one for one in leaves(state, (Tensor, nn.Module)) if isinstance(one, nn.Module)]
    for module in modules:
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), name)
    return found


def plan_text(plan: Any) -> Any:
    """A plan for information: its JSON where it has one, else its text."""
    if plan is None or isinstance(plan, str):
        return plan
    to_json = getattr(plan, "to_json", None)
    found = None if to_json is None else to_json()
    return found if isinstance(found, str) else repr(plan)
