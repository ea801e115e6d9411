"""Effects of a run of a user's forward: what it leaves in modules and in what these hold, and which numbers it draws.

A run may leave something in attributes and buffers, in containers and tensors that these hold, and in objects of users'
classes that they lead to, such as one that collects losses for several blocks. `Kept` is all of that as it is now.
"""

from __future__ import annotations

import operator
import random
import sys
from argparse import Namespace
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._torch_private import DisableTorchFunctionSubclass
from .values import parts, refill, same

_MACHINERY = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = tuple(leaf for leaf in nn.Module().__dict__ if "_hooks" in leaf)
"""A module's tables of hooks."""
_CONTAINERS = (list, dict, set, deque, UserDict)
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "transformers", "tokenizers"}
"""Packages whose objects keep nothing of a forward."""
_ABSENT = object()


class Slot(NamedTuple):
    """A place where a run may leave something: an attribute or a buffer of a module, or an attribute of an object that
    modules lead to. `name` is for people."""

    owner: Any
    leaf: str
    name: str
    is_buffer: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and self.owner is other.owner and self[1::2] == other[1::2]

    def __hash__(self) -> int:
        return hash((id(self.owner), self.leaf))  # an object of a user's may have no hash

    def get(self) -> Any:
        """Returns what it holds; an object of its own for nothing, which `put` takes for that."""
        return self._holder.get(self.leaf, _ABSENT)

    def put(self, value: Any) -> None:
        """Makes it hold `value`: a container that is there is filled anew, in place, for others may hold it, too."""
        now = self.get()
        if type(now) is not type(value) or not isinstance(now, _CONTAINERS):
            self.replace(value)
        elif now is not value:
            _fill(now, _content(value))

    def replace(self, value: Any) -> None:
        """Makes it hold this object."""
        if value is _ABSENT:
            self._holder.pop(self.leaf, None)
        else:
            self._holder[self.leaf] = value

    @property
    def _holder(self) -> dict[str, Any]:
        return self.owner._buffers if self.is_buffer else self.owner.__dict__


class Kept:
    """Everything that a run of `model` may leave something in, but parameters, as it is now.

    Cost: a copy of every tensor and numpy array in it.

    Arguments:
        ignored: attributes that are not looked at.
        copies: whether tensors and arrays are copied; if not, writes to tensors are told by their versions alone, and
            nothing can be restored.
    """

    def __init__(self, model: nn.Module, ignored: Collection[str] = (), copies: bool = True) -> None:
        self._ignored, self._copies = _MACHINERY.union(ignored), copies
        self._owners: dict[int, tuple[str, Any]] = {}
        self._leads: dict[int, list[int]] = {}  # an owner -> objects that its attributes hold
        self._was: dict[int, dict[Slot, Any]] = {}  # by owner
        self._inside: dict[Slot, dict[int, tuple[Any, dict]]] = {}  # the containers in a slot's value, with contents
        self._tensors: dict[int, _Held] = {}
        self._hooks = [(table, frozenset(table)) for module in model.modules() if copies for table in _tables(module)]
        waiting = list(model.named_modules())
        for name, owner in waiting:
            if id(owner) in self._owners:
                continue
            self._owners[id(owner)], met = (name, owner), len(waiting)
            self._was[id(owner)] = dict(self._attributes(name, owner))
            for slot, value in self._was[id(owner)].items():
                containers: dict[int, tuple[Any, dict]] = {}
                self._look(value, slot, containers, waiting)
                if containers:
                    self._inside[slot] = containers
            self._leads[id(owner)] = [id(held) for _, held in waiting[met:]]

    def held(self, within: nn.Module | None = None) -> Iterator[tuple[Slot, Any]]:
        """Yields every slot, of the whole model or of a module in it, with what it holds by now, be it nothing."""
        waiting, met = [*self._owners] if within is None else [id(module) for module in within.modules()], set()
        for at in waiting:
            if at in self._owners and at not in met:
                met.add(at)
                waiting += self._leads[at]
                now = dict(self._attributes(*self._owners[at]))
                yield from now.items()
                yield from ((slot, _ABSENT) for slot in self._was[at] if slot not in now)

    def changed(self, within: nn.Module | None = None) -> list[Slot]:
        """Returns the slots that hold other things than they did, of the whole model or of a module in it."""
        held = self.held(within)
        return [slot for slot, now in held if not same(now, self._before(slot)) or self._is_refilled(slot)]

    def refilled(self) -> list[Slot]:
        """Returns the slots of the whole model that hold a container that holds other things than it did."""
        return [slot for slot in self._inside if self._is_refilled(slot)]

    def written(self) -> list[Slot]:
        """Returns the slots of the whole model that hold other things than they did, or tensors and arrays that were
        written in place."""
        with torch.no_grad(), DisableTorchFunctionSubclass():
            written = [one.slot for one in self._tensors.values() if one.is_written]
        return list(dict.fromkeys([*self.changed(), *written]))

    def restore(self, buffers: bool = True) -> None:
        """Makes everything as it was, or all but buffers: the same objects hold the same. Hooks that were registered
        meanwhile go, as a model's note does that they are there; those that were removed stay away."""
        for slot, now in list(self.held()):
            if now is not (before := self._before(slot)) and (buffers or not slot.is_buffer):
                slot.replace(before)
        for container, content in (one for inside in self._inside.values() for one in inside.values()):
            if not _holds(container, content, operator.is_):
                _fill(container, content)
        for table, keys in self._hooks:
            for key in table.keys() - keys:
                del table[key]
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for held in self._tensors.values():
                if held.is_written and (buffers or not held.slot.is_buffer):
                    held.restore()

    def _attributes(self, name: str, owner: Any) -> Iterator[tuple[Slot, Any]]:
        prefix = f"{name}." if name else ""
        for leaf, value in list(owner.__dict__.items()):
            if leaf not in self._ignored and not isinstance(value, (nn.Module, nn.Parameter)):
                yield Slot(owner, leaf, prefix + leaf), value
        for leaf, value in list(owner._buffers.items()) if isinstance(owner, nn.Module) else ():
            yield Slot(owner, leaf, prefix + leaf, True), value

    def _look(self, value: Any, slot: Slot, containers: dict, objects: list[tuple[str, Any]]) -> None:
        """Notes what is in an attribute's value."""
        if isinstance(value, Tensor) or _is_array(value):
            if id(value) not in self._tensors and not isinstance(value, nn.Parameter):
                with torch.no_grad(), DisableTorchFunctionSubclass():
                    values = _values(value) if self._copies else None
                    copy = None if values is None else values.copy() if _is_array(values) else values.clone()
                    self._tensors[id(value)] = _Held(slot, value, _version(value), copy)
            return
        if _is_object(value):
            objects.append((slot.name, value))
        if isinstance(value, (tuple, *_CONTAINERS)) and id(value) not in containers:
            content = _content(value)
            containers[id(value)] = value, content
            for item in content.values():
                self._look(item, slot, containers, objects)

    def _before(self, slot: Slot) -> Any:
        return self._was[id(slot.owner)].get(slot, _ABSENT)

    def _is_refilled(self, slot: Slot) -> bool:
        return any(not _holds(*one) for one in self._inside.get(slot, {}).values())


class _Held(NamedTuple):
    """A tensor or a numpy array, with its version and, where they are copied, its values: kernels of batch
    normalization count no write."""

    slot: Slot
    holder: Any
    version: int | None
    values: Any

    @property
    def is_written(self) -> bool:
        if _version(self.holder) != self.version or self.values is None:
            return _version(self.holder) != self.version
        now = _values(self.holder)
        if _is_array(now):
            return now.tobytes() != self.values.tobytes()
        if now.shape != self.values.shape or now.dtype != self.values.dtype:
            return True
        return not (torch.equal(now, self.values) or torch.equal(now.nan_to_num(), self.values.nan_to_num()))

    def restore(self) -> None:
        now = _values(self.holder)
        if self.values is None:
            return
        if _is_array(now):
            now[...] = self.values
        elif now.shape != self.values.shape or now.dtype != self.values.dtype:
            self.holder.data = self.values
        else:
            now.copy_(self.values)


def _tables(module: nn.Module) -> Iterator[dict[int, Any]]:
    return (module.__dict__[leaf] for leaf in _HOOKS if leaf in module.__dict__)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # whoever holds an array has imported it
    return numpy is not None and isinstance(value, numpy.ndarray)


def _values(value: Any) -> Any:
    """Returns the tensor or array that holds the values, of a distributed tensor this rank's; None where these cannot
    be read."""
    if _is_array(value):
        return value
    plain = value.to_local() if hasattr(value, "to_local") else value
    return None if plain.is_meta or plain.layout is not torch.strided else plain.detach()


def _version(value: Any) -> int | None:
    """Returns how often it was written in place; None for an array, and for a tensor of inference mode, which do not
    count."""
    return None if _is_array(value) or value.is_inference() else value._version


def _content(container: Any) -> dict[Any, Any]:
    return dict.fromkeys(container) if isinstance(container, set) else dict(parts(container) or {})


def _holds(container: Any, content: dict[Any, Any], alike: Callable[[Any, Any], bool] = same) -> bool:
    now = _content(container)
    return now.keys() == content.keys() and all(alike(item, content[key]) for key, item in now.items())


def _fill(container: Any, content: dict[Any, Any]) -> None:
    if isinstance(container, set):
        container.clear()
        container.update(content)
    else:
        refill(container, content)


def _is_object(value: Any) -> bool:
    """True for an object of a user's that has attributes."""
    kind = type(value)
    if kind in (SimpleNamespace, Namespace):
        return True
    root = kind.__module__.partition(".")[0]
    if root in _LIBRARIES or root.startswith("vescale") or isinstance(value, (nn.Module, Tensor, type, Enum)):
        return False
    return type(getattr(value, "__dict__", None)) is dict


def python_states() -> dict[str, Any]:
    """Returns the states of Python's generator, and of numpy's where it is loaded, by module."""
    states: dict[str, Any] = {"random": random.getstate()}
    if numpy := sys.modules.get("numpy"):  # whoever draws from it has imported it
        name, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *rest)
    return states


@contextmanager
def host_generators_kept() -> Iterator[None]:
    """A block whose draws on the host nobody misses: torch's generator, Python's and numpy's are then as before."""
    numpy = sys.modules.get("numpy")
    kept, kept_random = torch.get_rng_state(), random.getstate()
    kept_numpy = numpy.random.get_state(legacy=False) if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(kept)
        random.setstate(kept_random)
        if numpy:
            numpy.random.set_state(kept_numpy)
