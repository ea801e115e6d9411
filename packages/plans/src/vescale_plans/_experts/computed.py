"""Weights of experts that are computed when they are read: torch's parametrizations, and so PEFT's adapters of stacked
weights, which are registered for each call.

A parametrized module is of a class whose properties compute them. During a call it is of its own class again, and holds
the values as it holds parameters, in the layouts of the parameters that they are computed from: the rest of a call
treats both alike, and gradients reach whatever a value was computed from.
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from vescale_dtensor import DTensor
from vescale_dtensor.engine import INVARIANT, convert


class Computed:
    """The computed weights of a module, held like parameters until `end`. Cost: conversions of values that do not lie
    as what they are computed from; nothing of a module that has none."""

    def __init__(self, module: nn.Module, cause: str) -> None:
        self._module, self._kind, values = module, type(module), {}
        if is_parametrized(module):
            for name, by in module.parametrizations.items():
                original = getattr(by, "original", None)  # of several there is no one layout
                if type(value := getattr(module, name)) is DTensor and original is not None:
                    layout = value.mesh_layout.base
                    pairs = zip(layout.states, original.mesh_layout.base.states)
                    states = [had if had.is_sharded else now if now.is_replicated else INVARIANT for now, had in pairs]
                    values[name] = convert(value, layout.with_states(states), cause)
        self._names = tuple(values)
        if values:
            module.__class__ = self._kind.__base__
            module._parameters.update(values)

    def end(self) -> None:
        for name in self._names:
            del self._module._parameters[name]
        if self._names:
            self._module.__class__ = self._kind
