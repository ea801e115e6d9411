"""State that modules keep between calls, and which of it a run of their forward writes.

    buffers       in place (`self.bias += ...`), through `.data`, or replaced
    attributes    tensors, arrays and numbers, replaced or written in place
    containers    what attributes hold: lists, dicts, sets, deques, and objects of the user's own classes

A deep look copies every tensor, tells writes through `.data`, and can take everything back. A quick one, which every
call can afford, compares identities and versions of what modules hold themselves.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import local_only
from vescale_trace.values import same

_NOT_ITS_OWN = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_call_impl"}
"""Attributes of a module that torch and this library write; buffers are looked at apart."""
_FOREIGN = ("builtins", "torch", "types", "functools", "weakref", "logging")
_DEPTH = 4
_MISSING = object()


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's own."""
    return {key: one for key, one in vars(module).items() if key not in _NOT_ITS_OWN}


class Kept:
    """State that `modules`, by their names, hold now. Cost of a deep look: a copy of every tensor that they hold."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], deep: bool) -> None:
        self._deep, self._seen = deep, set()
        self._holders: list[_Holder] = []
        self._tensors: list[_Held] = []
        for name, module in modules:
            prefix = f"{name}." if name else ""
            self._look(_Holder(vars(module), prefix, None, _NOT_ITS_OWN), 0)
            self._look(_Holder(module._buffers, prefix, None), 0)

    def written(self) -> tuple[str, ...]:
        """The names, by the modules' own, of what is other than it was."""
        changed = [name for holder in self._holders for name in holder.changed()]
        return tuple(dict.fromkeys([*changed, *(held.name for held in self._tensors if held.is_changed())]))

    def restore(self) -> None:
        """Everything is as it was. Only of a deep look."""
        for holder in self._holders:
            if any(True for _ in holder.changed()):
                holder.restore()
        for held in self._tensors:
            if held.is_changed():
                held.restore()

    def _look(self, holder: _Holder, depth: int) -> None:
        self._holders.append(holder)
        for key, item in holder.was.items():
            if id(item) in self._seen:
                continue
            if isinstance(item, Tensor) or _is_array(item):
                self._seen.add(id(item))
                copy = _copied(item) if self._deep else None
                self._tensors.append(_Held(holder.name_of(key), item, _version(item), copy))
            elif self._deep and depth < _DEPTH and (inside := _inside(item)) is not None:
                self._seen.add(id(item))
                self._look(_Holder(inside, "", holder.name_of(key)), depth + 1)


class _Holder:
    """Something that holds values, and those that it held. `name`: the attribute it belongs to, None if its keys are
    the attributes."""

    def __init__(self, value: Any, prefix: str, name: str | None, skipped: frozenset[str] = frozenset()) -> None:
        self._value, self._prefix, self._name, self._skipped = value, prefix, name, skipped
        self.was = self._pairs()

    def name_of(self, key: Any) -> str:
        return f"{self._prefix}{key}" if self._name is None else self._name

    def changed(self) -> Iterator[str]:
        now = self._pairs()
        for key in dict.fromkeys([*self.was, *now]):
            if not same(self.was.get(key, _MISSING), now.get(key, _MISSING)):
                yield self.name_of(key)

    def restore(self) -> None:
        if isinstance(self._value, dict):
            for key in self._pairs().keys() - self.was.keys():
                del self._value[key]
            self._value.update(self.was)
        else:
            self._value.clear()
            add = self._value.update if isinstance(self._value, set) else self._value.extend
            add(self.was.values())

    def _pairs(self) -> dict[Any, Any]:
        if isinstance(self._value, dict):
            return {key: one for key, one in self._value.items() if key not in self._skipped}
        return {one: one for one in self._value} if isinstance(self._value, set) else dict(enumerate(self._value))


class _Held(NamedTuple):
    """A tensor or an array that is written in place."""

    name: str
    value: Any
    version: int | None
    copy: Any

    def is_changed(self) -> bool:
        if self.version is not None and _version(self.value) != self.version:
            return True
        return self.copy is not None and not _equal(self.value, self.copy)

    def restore(self) -> None:
        if _is_array(self.value):
            self.value[...] = self.copy
        else:
            with torch.no_grad():
                _plain(self.value).data.copy_(self.copy)


def _inside(value: Any) -> Any:
    """Returns the part of an attribute's value that a forward may write; None for nothing."""
    if isinstance(value, (dict, list, set, deque)):
        return value
    if isinstance(value, (nn.Module, type)) or callable(value):
        return None
    root = type(value).__module__.partition(".")[0]
    return None if root in _FOREIGN or root.startswith("vescale") else getattr(value, "__dict__", None)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # whoever holds an array has imported it
    return numpy is not None and isinstance(value, numpy.ndarray)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if type(tensor) is DTensor else tensor


def _version(value: Any) -> int | None:
    """Returns the version, None for what counts no writes."""
    if _is_array(value) or value.is_inference():
        return None
    with local_only():
        return value._version


def _copied(value: Any) -> Any:
    return value.copy() if _is_array(value) else _plain(value).detach().clone()


def _equal(value: Any, copy: Any) -> bool:
    if _is_array(value):
        return value.tobytes() == copy.tobytes()
    now = _plain(value).detach()
    if now.shape != copy.shape or now.dtype != copy.dtype:
        return False
    return now.is_meta or bool(((now == copy) | ((now != now) & (copy != copy))).all())
