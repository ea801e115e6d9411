"""What a recorded pass of a model did that a graph of a compiler would do otherwise, or do once."""

from __future__ import annotations

import gc
from operator import is_
from typing import Any

from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import local_only

from ..._apply.containers import tensors_in
from ..._apply.generators import drawn_from, random_states, same_states
from ..static_region import StaleRegion


class Refused(StaleRegion):
    """Why a model's call is not compiled whole."""


class Before:
    """How things were before a recorded pass."""

    def __init__(self, model: nn.Module, given: Any) -> None:
        self._model, self._states, self._drawn, self._alive = model, random_states(), drawn_from(), _alive()
        self._held = _held_by(model)
        self._lasting = [*model.parameters(), *model.buffers(), *tensors_in(given)]
        self._versions = _versions_of(self._lasting)

    def check(self, returned: Any) -> None:
        """Raises Refused where the pass did what a graph would do otherwise, or do once."""
        if not same_states(self._states, random_states()) or self._drawn != drawn_from():
            raise Refused("it draws random numbers")
        now = _held_by(self._model)
        if len(now) != len(self._held) or not all(map(is_, now, self._held)):
            raise Refused("its modules hold other values after the call than before")
        if _versions_of(self._lasting) != self._versions:  # a backward may compute from them again (pytorch #197039)
            raise Refused("it writes to its buffers or its arguments in place")
        if {*map(id, self._lasting)} & {*map(id, tensors_within(returned))}:
            raise Refused("it returns a parameter, a buffer or an argument")
        own = [*self._model.parameters(), *self._model.buffers()]
        remembered = tensors_within([tensor.__dict__ for tensor in own])  # conversions that later calls may share
        known = {id(tensor) for tensor in (*self._alive, *tensors_within(returned), *own, *remembered)}
        if _is_held_anywhere([tensor for tensor in _alive() if id(tensor) not in known]):
            raise Refused("a tensor of its call outlives it, beside what it returns")


def _held_by(model: nn.Module) -> list:
    """The values of all modules' attributes, parameters and buffers."""
    tables = [table for one in model.modules() for table in (one.__dict__, one._parameters, one._buffers)]
    return [value for table in tables for name, value in table.items() if name != "forward"]  # sites come and go


def _versions_of(tensors: list[Tensor]) -> list[int]:
    with local_only():
        return [0 if one.is_inference() else one._version for one in tensors]


def _alive() -> list[DTensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is DTensor]


def _is_held_anywhere(tensors: list[DTensor]) -> bool:
    """Whether anything of Python's holds one of them; what autograd saved, C++ alone holds."""
    return any(holder is not tensors for holder in gc.get_referrers(*tensors)) if tensors else False


def tensors_within(value: Any) -> list[Tensor]:
    """The tensors of what a model returns, each once, in order; also those in attributes of objects there."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            found.setdefault(id(one), one)
        elif id(one) not in seen:
            seen.add(id(one))
            waiting += reversed(_parts_of(one))
    return list(found.values())


def _parts_of(value: Any) -> list:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if isinstance(value, (type, nn.Module)) or callable(value):
        return []
    return list(getattr(value, "__dict__", {}).values())
