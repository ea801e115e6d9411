"""Stand-ins that a compiler sees in the places of parameters, buffers and inputs: plain tensors without memory."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, VescaleError
from vescale_dtensor.engine import local_only

from .refusals import Refused

_TABLES = ("_parameters", "_buffers", "_modules")
_shape, _dtype, _device = Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__
_layout = attrgetter("_layout")
_FACTS = (_shape, Tensor.stride, _dtype, _device, Tensor.requires_grad.__get__)


class StandIns:
    """The stand-ins of one model, one per live tensor: the same object until what a guard asks of it changes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._facts: list = []
        self.standing: dict[int, tuple[Tensor, Tensor]] = {}
        """By a parameter or buffer: that, and what stands for it."""

    def refresh(self) -> bool:
        """Looks at what the model holds now. What is seen in each call runs in C. Returns whether the modules, or what
        they hold, are others."""
        if is_new := not self._are_places_the_same():
            self._find_places()
        with local_only():
            facts = [fact for of in _FACTS for fact in map(of, self._real)]
        facts += map(_layout, self._real)
        if facts != self._facts:
            self.standing = {id(real): (real, self._for(real)) for real in self._real}
            self._facts = facts
        return is_new

    def put(self) -> None:
        """Puts them in the places."""
        for (table, name), real in zip(self._places, self._real):
            table[name] = self.standing[id(real)][1]

    def take_off(self) -> None:
        """Puts the real tensors back."""
        for (table, name), real in zip(self._places, self._real):
            table[name] = real

    def _are_places_the_same(self) -> bool:
        tables = [module.__dict__[kind] for module in self._modules for kind in _TABLES]
        return (
            bool(self._modules)
            and all(map(is_, tables, self._tables))
            and [*chain.from_iterable(tables)] == self._names
            and all(map(is_, chain.from_iterable(map(dict.values, tables)), self._held))
        )

    def _find_places(self) -> None:
        self._modules = list(self._model.modules())
        self._tables = [module.__dict__[kind] for module in self._modules for kind in _TABLES]
        self._names = [*chain.from_iterable(self._tables)]
        self._held = [*chain.from_iterable(map(dict.values, self._tables))]
        found = [(table, name) for table in self._tables for name, held in table.items() if type(held) is DTensor]
        self._places, self._real = found, [table[name] for table, name in found]
        self._facts = []

    def _for(self, real: DTensor) -> Tensor:
        _, known = self.standing.get(id(real), (None, None))
        if known is not None and _facts_of(known) == _facts_of(real):
            return known
        return placeholder(real)


def _facts_of(tensor: Tensor) -> tuple:
    """Returns what a compiler asks of a tensor, global for a DTensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def placeholder(real: DTensor) -> Tensor:
    """Returns a plain tensor like the global one, a Parameter for one, without memory.

    Raises Refused for a parameter of a class of the user's, which code may ask for, and if no strides are known.
    """
    if real._kind is not DTensor:
        raise Refused(f"a parameter is of the class {real._kind.__name__}")
    try:
        shape, stride, dtype, device, trains = _facts_of(real)
    except VescaleError as error:
        raise Refused(f"it is given a tensor of unknown strides: {error}") from None
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    if getattr(real, "_is_param", False):
        return nn.Parameter(made, requires_grad=trains)
    return made.requires_grad_(trains)
