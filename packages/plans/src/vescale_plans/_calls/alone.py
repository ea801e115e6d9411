"""Attributes that belong to one very module object: a copy of the module does not take them."""

from __future__ import annotations

from typing import Any

from torch import nn

_STATE = "__getstate__"
"""Python asks the object for it, not its class, when it is copied."""


class Alone:
    """An attribute that a copy of a module drops: it would run the original."""

    def leave(self, held: dict[str, Any]) -> None:
        """Takes itself off what a module, or a copy of it, holds."""
        raise NotImplementedError


class State(Alone):
    """Answers `copy.copy` of a module on which something stands."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        module.__dict__.setdefault(_STATE, self)

    def __call__(self) -> Any:
        state = type(self._module).__getstate__(self._module)
        held, *slots = state if isinstance(state, tuple) else (state,)
        if not isinstance(held, dict):
            return state
        held = dict(held)
        take_off(held)
        return (held, *slots) if isinstance(state, tuple) else held

    def leave(self, held: dict[str, Any]) -> None:
        if held.get(_STATE) is self:
            del held[_STATE]


def take_off(held: dict[str, Any]) -> None:
    """Takes all of it off what a module, or a copy of it, holds."""
    for one in [value for value in held.values() if isinstance(value, Alone)]:
        one.leave(held)
