"""Numbers, hooks and submodules that Python tells a step, and what its names stand for, as a graph has them."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from vescale_trace.effects import Kept
from vescale_trace.values import PLAIN

Optimizer = torch.optim.Optimizer
_HELD = frozenset(("_parameters", "_buffers", "training", "param_groups", "state", "defaults"))
"""Attributes of modules and optimizers that `Held` looks at."""
_MACHINERY = nn.Module().__dict__.keys() - _HELD


class Reads:
    """Everything that a step may read on the host, as it is now: attributes and hooks of models, of optimizers, and of
    objects that it names, what is in their dicts and lists, and what its names stand for.

    A list may grow: one of losses does. What functions that it calls read in modules of their own is not looked at.
    """

    def __init__(self, step: Callable, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._names: list[str] = []
        self._places: list[tuple[Any, Any]] = []
        self._sized: dict[int, tuple[str, dict]] = {}  # dicts that shall have as many entries
        self._met: set[int] = set()
        root = root_of(step, models)
        for slot, _ in Kept(root, copies=False).held():
            if slot.owner is root:
                self._look(slot.leaf, slot.get())
            else:
                self._look(slot.name.rpartition(".")[0] or type(slot.owner).__name__, slot.owner.__dict__)
        for optimizer in optimizers:
            for key, one in list(optimizer.__dict__.items()):
                if type(one) in (*PLAIN, OrderedDict):  # counts, and hooks
                    self._place(f"{type(optimizer).__name__}.{key}", optimizer.__dict__, key)
        if function := _function(step):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                self._place(name, cell, None)
            for name in inspect.getclosurevars(function).globals:
                self._place(name, function.__globals__, name)
        self._values, self._was = self._now(), [len(one) for _, one in self._sized.values()]
        self._marks = [*map(mark, self._values)]

    def changed(self) -> str:
        """Returns what is otherwise by now, "" for nothing. Cost: a look at each attribute."""
        now = self._now()
        marks = [*map(mark, now)]
        if marks != self._marks:
            at = next(at for at, (one, before) in enumerate(zip(marks, self._marks)) if one != before)
            before, after = self._values[at], now[at]
            is_plain = type(before) in PLAIN and type(after) in PLAIN
            return self._names[at] + (f" went from {before} to {after}" if is_plain else " is another object")
        for (name, one), before in zip(self._sized.values(), self._was):
            if len(one) != before:
                return f"{name} has other entries"
        return ""

    def _look(self, name: str, holder: Any) -> None:
        """Notes what is in a container."""
        if type(holder) not in (dict, OrderedDict, list) or id(holder) in self._met:
            return
        self._met.add(id(holder))
        if type(holder) is not list:
            self._sized[id(holder)] = name, holder
        for key, value in [*(enumerate(holder) if type(holder) is list else holder.items())]:
            if key in _MACHINERY:
                self._look(name, value)  # hooks and submodules
            elif key not in _HELD:
                self._place(f"{name}.{key}", holder, key)

    def _place(self, name: str, holder: Any, key: Any) -> None:
        self._names.append(name)
        self._places.append((holder, key))
        self._look(name, _get(holder, key))

    def _now(self) -> list[Any]:
        return [_get(holder, key) for holder, key in self._places]


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    if isinstance(holder, list):
        return holder[key] if key < len(holder) else None
    try:
        return holder.cell_contents
    except ValueError:  # of a name that stands for nothing yet
        return None


def mark(value: Any) -> Any:
    """Returns what tells a value from others: 1 from True, and 0.0 from -0.0, too; objects are told by themselves."""
    kind = type(value)
    return (kind, repr(value) if kind is float else value) if kind in PLAIN else id(value)


def root_of(step: Callable, models: Sequence[nn.Module]) -> nn.Module:
    """Returns a module of all that a step works on: its models, and what else it names."""
    root = nn.Module()
    for number, model in enumerate(models):
        root.add_module(f"{type(model).__name__}{number or ''}", model)
    others = {name: one for name, one in names_of(step).items() if not isinstance(one, (nn.Module, Optimizer))}
    root.__dict__.update(others)
    return root


def names_of(step: Callable) -> dict[str, Any]:
    """Returns what names in a function stand for, those around it and those of its module; a method's object, and what
    it was given beforehand, too."""
    given: dict[str, Any] = {}
    while isinstance(step, functools.partial):
        given |= {str(at): one for at, one in enumerate(step.args)} | step.keywords
        step = step.func
    function = _function(step)
    own = given | {"self": getattr(step, "__self__", None if inspect.isroutine(step) else step)}
    if function is None:
        return own
    found = inspect.getclosurevars(function)
    defaults = {f"default {at}": one for at, one in enumerate(function.__defaults__ or ())}
    return own | defaults | dict(found.nonlocals) | dict(found.globals)


def _function(step: Callable) -> Any:
    """Returns the function in Python of which a step is made, None for none."""
    while isinstance(step, functools.partial):
        step = step.func
    step = inspect.unwrap(step)
    step = getattr(step, "__func__", step) if inspect.isroutine(step) else inspect.unwrap(type(step).__call__)
    return step if inspect.isfunction(step) else None
