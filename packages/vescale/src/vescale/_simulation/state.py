"""The part of a process's state that is a rank's own: swapped when the turn goes to another rank.

All else is shared, and may be: pure caches, tables that are filled at import, registries by object. Each package says
in its `rank_state` which of its module-level names change while a program runs; a test looks for one that is in none.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from vescale_dtensor.engine import WHOLE_GROUP

from .._machine._torch_private import c10d_world
from . import generators

PACKAGES = ("vescale_dtensor", "vescale_rng", "vescale_plans", "vescale_pipeline", "vescale_checkpoint")
_TOLD = {package: importlib.import_module(f"{package}.rank_state") for package in PACKAGES}

OURS = {f"{package}.{module}": names for package, told in _TOLD.items() for module, names in told.PER_RANK.items()}
"""Module -> names of which every rank has its own, as each package says of itself; after a dot, an attribute of an
object that all of them import."""

SHARED = {
    **{f"{package}.{module}": names for package, told in _TOLD.items() for module, names in told.SHARED.items()},
    "vescale._scaler": ("lines",),  # by object, and objects are a rank's own
    "vescale.simulate": ("_create",),  # the simulation itself
}
"""Module -> names that all ranks share, as each package says, with its reasons."""

TORCHS = {
    "torch.distributed.distributed_c10d": (
        *("_world", "_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_group_count", "_tags_to_pg"),
        *("_pg_to_tag", "_backend", "_default_pg_init_method"),
        *WHOLE_GROUP,  # which the debugger replaces while it executes a command
    ),
    "torch.distributed": WHOLE_GROUP,
    "torch.nn.modules.module": (
        *("_global_backward_pre_hooks", "_global_backward_hooks", "_global_is_full_backward_hook"),
        *("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called"),
        *("_global_forward_hooks_with_kwargs",),
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
    "sys": ("stdin", "stdout", "breakpointhook", "displayhook", "excepthook"),
    "warnings": ("filters", "showwarning"),
    "pdb": ("set_trace",),
}

_FRESH: dict[tuple[str, str], Callable[[], Any]] = {
    ("torch.distributed.distributed_c10d", "_world"): lambda: type(c10d_world())(),
    ("torch.distributed.distributed_c10d", "_group_count"): lambda: 0,
    ("torch.distributed.distributed_c10d", "_backend"): lambda: None,
    ("torch.distributed.distributed_c10d", "_default_pg_init_method"): lambda: None,
    **{
        ("torch.distributed.distributed_c10d", name): dict
        for name in ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
    },
}
"""State that a rank begins with, if that is not what stood outside."""

_CONTAINERS = (list, dict, set, deque)
_ANEW = {(f"vescale_dtensor.{module}", name) for module, name in _TOLD["vescale_dtensor"].ANEW}
_SHARED_TABLES = {(f"vescale_dtensor.{module}", name) for module, name in _TOLD["vescale_dtensor"].UNCOPIED}
_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def owner(module: str, name: str) -> tuple[Any, str]:
    """Returns the holder of a name of the tables, and the name there."""
    *path, last = name.split(".")
    return functools.reduce(getattr, path, importlib.import_module(module)), last


class Place:
    """Names of one module, or attributes of one object: read and written at once, for there are many hand-overs."""

    def __init__(self, path: str, holder: Any, names: list[str]) -> None:
        self.path, self.names = path, names
        every = operator.itemgetter(*names, names[0])  # a tuple, where one name would give its value
        if isinstance(holder, ModuleType):
            self.read: Callable[[], tuple] = functools.partial(every, vars(holder))
            self.write: Callable[[Iterable[tuple[str, Any]]], None] = vars(holder).update
        else:
            self.read = functools.partial(operator.attrgetter(*names, names[0]), holder)
            self.write = functools.partial(_set_attributes, holder)


def _set_attributes(holder: Any, values: Iterable[tuple[str, Any]]) -> None:
    for name, value in values:
        setattr(holder, name, value)


@functools.cache
def _places() -> list[Place]:
    """Places of all names of the tables."""
    found: dict[tuple[str, int], tuple[Any, list[str]]] = {}
    for path, names in {**OURS, **TORCHS}.items():
        for name in names:
            holder, last = owner(path, name)
            found.setdefault((path, id(holder)), (holder, []))[1].append(last)
    return [Place(path, holder, names) for (path, _), (holder, names) in found.items()]


class RankState:
    """One rank's own part of the process's state, while another runs."""

    def __init__(self, rank: int, ranks: int) -> None:
        """Takes the state of a rank that has not begun."""
        self._values: list[tuple] = [
            tuple(self._first(place.path, name, value) for name, value in zip(place.names, place.read()))
            for place in _places()
        ]
        self._environment = dict(zip(_ENVIRONMENT, map(str, (rank, rank, ranks, ranks))))
        self._numbers = _numbers()

    def enter(self) -> None:
        """The rank runs from now on."""
        for place, values in zip(_places(), self._values):
            place.write(zip(place.names, values))
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        _set_numbers(self._numbers)
        if hasattr(warnings, "_filters_mutated"):  # a cache of theirs
            warnings._filters_mutated()

    def leave(self) -> None:
        """Puts the rank's state away."""
        self._values = [place.read() for place in _places()]
        self._environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._numbers = _numbers()

    def come_back(self) -> None:
        """Restores the outer state: names that were not in the environment are gone again."""
        for name in _ENVIRONMENT:
            os.environ.pop(name, None)
        self.enter()

    @staticmethod
    def _first(path: str, name: str, value: Any) -> Any:
        fresh = _FRESH.get((path, name))
        if fresh is not None:
            return fresh()
        if (path, name) in _ANEW:
            return type(value)()
        return value.copy() if isinstance(value, _CONTAINERS) and (path, name) not in _SHARED_TABLES else value


def _numbers() -> tuple:
    """Returns the generators' places, and torch's default dtype."""
    return torch.get_rng_state(), generators.places(), torch.get_default_dtype()


def _set_numbers(found: tuple) -> None:
    torch.set_rng_state(found[0])
    generators.go_to(found[1])
    if torch.get_default_dtype() is not found[2]:
        torch.set_default_dtype(found[2])
