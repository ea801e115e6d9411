"""Steps of a plan inside of a compiled region: the compiler sees an operator in their places.

Modules inside have steps of their calls, Python that a compiler is not to see. While it traces and asks its guards,
they are off, and each forward begins and ends with `vescale::step`, which returns what it is given. Where the graph is
run on shards, the operator is the steps themselves.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .._calls.chain import Call

_CONTAINERS = (tuple, list, dict)
_CALL = "_call_impl"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_CONVERT = frozenset({"boundary", "arguments", "sharing"})
"""Phases that convert and remember conversions: a graph of shards does as they do. Others look at calls."""

_library = torch.library.Library("vescale", "FRAGMENT")
_library.define("step(Tensor(a) given, str what, str module) -> Tensor(a)")
_library.impl("step", lambda given, what, module: given.view_as(given), "CompositeImplicitAutograd")


class Steps:
    """The steps of all modules inside of one module.

    Attributes:
        refused: what a step does that a graph does not, "" if there is none.
    """

    def __init__(self, region: nn.Module) -> None:
        self._region = region
        self._held: list[tuple[dict, dict]] = []
        self.find()

    def find(self) -> None:
        """Looks for them anew."""
        self.inside = {name: module for name, module in self._region.named_modules()
                       if module is not self._region and isinstance(module.__dict__.get(_CALL), Call)}  # fmt: skip
        self._calls = [module.__dict__[_CALL] for module in self.inside.values()]
        self._orders = [call.order for call in self._calls]
        self.refused = self._refused()
        self._shown = {} if self.refused else {name: _marked(name, module) for name, module in self.inside.items()}

    def watched(self) -> str:
        """Returns what of the modules makes a call eager, "" for nothing: hooks among the steps."""
        return "" if all(call.is_alone() for call in self._calls) else "a module inside has hooks"

    def refresh(self) -> None:
        """Looks at the steps that have come, or gone."""
        if [call.order for call in self._calls] != self._orders:
            self.find()

    def _refused(self) -> str:
        """Returns what a step does that a graph does not, "" if there is none."""
        for name, order in zip(self.inside, self._orders):
            if others := [step.phase for step in order.steps if step.name not in _CONVERT]:
                return f"in each call of {name}, {others[0].before or others[0].after}"
        return ""

    @property
    def kind(self) -> tuple:
        """By what regions of one class may share their graphs: which modules have steps."""
        return tuple((name, *(step.name for step in order.steps)) for name, order in zip(self.inside, self._orders))

    def put(self) -> None:
        """Takes the steps off, and puts the operators in their places."""
        self._held = [({name: held[name] for name in (_CALL, "forward", *_HOOKS) if name in held}, held)
                      for held in (module.__dict__ for module in self.inside.values())]  # fmt: skip
        for name, (_, held) in zip(self.inside, self._held):
            del held[_CALL]
            held.update(self._shown[name])

    def take_off(self) -> None:
        """Puts the steps back."""
        for was, held in self._held:
            if "forward" not in was:
                del held["forward"]
            held.update(was)
        self._held = []

    def apply(self, given: Tensor, what: str, name: str) -> Tensor:
        """Returns what the steps of the module of that name make of a tensor that enters it, of one of its arguments,
        or of what it returns."""
        module = self.inside[name]
        order = module.__dict__[_CALL].order
        if what == "leave":
            for step in order.after:
                made = step.after(module, (), {}, given)
                given = given if made is None else made
            return given
        for step in order.before:
            if (step.name == "arguments") != (what != "enter"):
                continue
            made = step.before(module, (given,), {}) if what == "enter" else step.before(module, (), {what: given})
            if made is not None:
                given = made[0][0] if what == "enter" else made[1][what]
        return given


def has_step(module: nn.Module, *names: str) -> bool:
    """True if calls of a module have a step of one of these names."""
    call = module.__dict__.get(_CALL)
    return isinstance(call, Call) and any(step.name in names for step in call.order.steps)


def _marked(name: str, module: nn.Module) -> dict[str, Any]:
    """Returns what a module holds while it is traced."""
    own = module.__dict__.get("forward")
    forward = type(module).forward if own is None else None
    named = any(step.name == "arguments" for step in module.__dict__[_CALL].order.steps)
    positions = list(inspect.signature(module.forward).parameters) if named else []

    def through(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _entering(name, args, kwargs)
        if named:
            known = len(positions)
            args = tuple([_argument(one, positions[at], name) if at < known else one for at, one in enumerate(args)])
            kwargs = {key: _argument(one, key, name) for key, one in kwargs.items()}
        out = forward(self, *args, **kwargs) if forward is not None else own(*args, **kwargs)
        return _leaving(name, out)

    return {"forward": MethodType(through, module), **{table: OrderedDict() for table in _HOOKS}}


# What follows is traced, so it is written out. What it does not know, a compiler cannot take.


def _entering(name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Returns the arguments, with the operator before the first tensor."""
    for at, one in enumerate(args):
        if isinstance(one, Tensor):
            return (*args[:at], torch.ops.vescale.step(one, "enter", name), *args[at + 1 :]), kwargs
        if isinstance(one, _CONTAINERS):
            break
    else:
        for key, one in kwargs.items():
            if isinstance(one, Tensor):
                return args, {**kwargs, key: torch.ops.vescale.step(one, "enter", name)}
            if isinstance(one, _CONTAINERS):
                break
    raise TypeError(f"{name} is given no tensor before other arguments")


def _leaving(name: str, out: Any) -> Any:
    """Returns what a forward returned, with the operator behind the first tensor."""
    if isinstance(out, Tensor):
        return torch.ops.vescale.step(out, "leave", name)
    if type(out) in (tuple, list) and out and isinstance(out[0], Tensor):
        return type(out)([torch.ops.vescale.step(out[0], "leave", name), *out[1:]])
    raise TypeError(f"{name} returns no tensor before others")


def _argument(value: Any, argument: str, name: str) -> Any:
    """Returns an argument with the operator before it, or before each of several."""
    if isinstance(value, Tensor):
        return torch.ops.vescale.step(value, argument, name)
    if type(value) in (tuple, list):
        return type(value)([_argument(one, argument, name) for one in value])
    return value
