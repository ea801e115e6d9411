"""Sends flex_attention, create_block_mask and create_mask to dispatch.

They are Python functions that ask no class, and programs hold them in many ways before this library is imported: by
`from ... import`, in a partial, compiled. So nothing can stand in front of them but what is in them: each keeps its
object, and has other code, which looks at what it is given. torch's own code is in another function beside it, and
runs for all else, compiled where the call was: the tracer leaves these few lines alone, and would see no shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention import flex_attention as torchs

from .._torch_private import compiled_as, leave_to_python

Answer = Callable[["Door", tuple, dict], Any]


class Door:
    """One function of torch's: `function`, which everybody holds, and `original`, which does what it did."""

    def __init__(self, name: str) -> None:
        self.function: FunctionType = getattr(torchs, name)
        held = self.function
        self.original = FunctionType(held.__code__, held.__globals__, name, held.__defaults__, held.__closure__)
        self.original.__kwdefaults__, self.original.__doc__ = held.__kwdefaults__, held.__doc__
        self.original.__module__, self.original.__annotations__ = held.__module__, held.__annotations__
        self.signature = inspect.signature(held)
        self.answer: Answer | None = None  # for a call that is not torch's own business; None where it is

    def given(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """The arguments by name, defaults too."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def open(self, args: tuple, kwargs: dict) -> Any:
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        if self.answer is not None:
            found = self.answer(self, args, kwargs)
            if found is not NotImplemented:
                return found
        return compiled(self)(*args, **kwargs)


def compiled(door: Door) -> Callable:
    """torch's own function, compiled as the call is that is under way."""
    return compiled_as(door.original) or door.original


def _exchange(door: Door, code: FunctionType) -> Door:
    """Puts the code in place, once for the process."""
    function, name = door.function, door.function.__name__
    function.__globals__[f"_vescale_{name}"] = door
    function.__code__ = code.__code__.replace(co_name=name, co_names=(f"_vescale_{name}", "open"))
    function.__defaults__ = function.__kwdefaults__ = None
    function.__wrapped__ = door.original  # for who asks for the signature
    leave_to_python(function.__code__)
    return door


def _code(*args, **kwargs):
    return _vescale_door.open(args, kwargs)  # noqa: F821 - a global of torch's module, by another name


FLEX, BLOCKS, MASK = (_exchange(Door(name), _code) for name in ("flex_attention", "create_block_mask", "create_mask"))
