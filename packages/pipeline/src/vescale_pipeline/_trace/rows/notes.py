"""Every function that a forward calls, in order, with what it is given and what it makes, by numbers of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vescale_trace.stack import frames, is_users, user_line
from vescale_trace.values import leaves, map_tensors, tensors_in

from ..._torch_private import _is_torch_function_enabled
from ..placeholder import Placeholder, memory_of, name_of

_READS = frozenset(("item", "tolist", "numpy", "__int__", "__float__", "__index__", "__complex__", "__array__"))
"""Functions that make numbers of values. What is true or false decides the path alone, and the paths are compared."""

_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = frozenset(("__setitem__", *(f"__i{name}__" for name in _IN_PLACE)))
_TEXT = frozenset(("__format__", "__repr__", "__str__"))
"""Methods that read a value to write it down, for an error's text."""


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of a noted function. `strange`: made by no function that was noted. `memory`: the
    name of its storage, which its views have, too."""

    number: int
    shape: tuple[int, ...]
    strange: bool
    integer: bool
    placeholder: bool
    boolean: bool
    memory: int


@dataclass(frozen=True)
class Note:
    function: Callable
    name: str
    args: tuple
    kwargs: dict
    outs: tuple[Ref, ...]
    line: str = ""  # who called it, outside of torch and of veScale
    written: Ref | None = None  # what it writes to in place


@dataclass(frozen=True)
class Step:
    """One function, as it was called for a part and for the whole batch.

    Arguments:
        refs: the tensors among its arguments for the part, each with the dim of the batch's rows in `axes`, and with
            how it comes from them in `tags`.
        outs: the dims of the rows in its outputs.
        ratio: how many times as large the numbers among the arguments are for the whole batch; None if they disagree.
    """

    note: Note
    refs: list[Ref]
    axes: list[Any]
    tags: list[Any]
    outs: list[Any]
    ratio: float | None


class Notes(TorchFunctionMode):
    """Every function that a dry run calls, at the top level.

    `takes_own`: whether what is known of its rows is so for masks that `check_rows_take_own` lets pass.
    """

    def __init__(self) -> None:
        self.takes_own = False
        self.notes: list[Note] = []
        self._known: dict[int, tuple[Tensor, Ref]] = {}  # the tensor is kept: its id is its name
        self._count = 0
        super().__init__()

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not _is_torch_function_enabled():  # what moves shards: how it does so is not the forward's
            return function(*args, **(kwargs or {}))
        name = name_of(function)
        if name == "__set__" and isinstance(args[0], nn.Parameter):
            return function(*args)  # a plan points parameters at gathered memory, or at what they rest in
        out = function(*args, **(kwargs or {}))
        made = [args[0]] if name in ("__setitem__", "__set__") else tensors_in(out)
        if made or name in _READS and args[0].dtype is not torch.bool and not _is_written_down():
            given = map_tensors((args, kwargs or {}), self._ref)
            outs = tuple(self._new(tensor, strange=False) for tensor in made)
            is_written = name in _WRITES or name.endswith("_") and not name.endswith("__")
            target = given[0][0] if is_written and given[0] else given[1].get("out")
            written = target if isinstance(target, Ref) else None
            self.notes.append(Note(function, name.strip("_"), *given, outs, user_line(), written))
        return out

    def number_of(self, tensor: Tensor) -> int:
        """-1 for a tensor that no function made."""
        known = self._known.get(id(tensor))
        return known[1].number if known is not None else -1

    def is_as(self, made: Tensor, tensor: Tensor) -> None:
        """A value that stands for another is known as that one is."""
        self._known[id(made)] = made, replace(self._ref(tensor), memory=memory_of(made))

    def _ref(self, tensor: Tensor) -> Ref:
        known = self._known.get(id(tensor))
        if known is None:
            return self._new(tensor, strange=True)
        return replace(known[1], placeholder=type(tensor) is Placeholder)  # it may have become one

    def _new(self, tensor: Tensor, strange: bool) -> Ref:
        self._count += 1
        is_value = type(tensor) is Placeholder and not tensor.is_weight
        weight = isinstance(tensor, nn.Parameter) or type(tensor) is Placeholder and tensor.is_weight
        lost = strange and is_value and not weight
        integer = not tensor.is_floating_point()
        stands, boolean = type(tensor) is Placeholder, tensor.dtype is torch.bool
        try:
            memory = memory_of(tensor)
        except NotImplementedError:  # a tensor of vmap, or a sparse one, has no storage of its own
            memory = -self._count
        ref = Ref(self._count, tuple(tensor.shape), lost, integer, stands, boolean, memory)
        self._known[id(tensor)] = (tensor, ref)
        return ref


def refs_in(note: Note) -> list[Ref]:
    """Returns the tensors among its arguments."""
    return [leaf for leaf in leaves((note.args, note.kwargs), Ref) if isinstance(leaf, Ref)]


def _is_written_down() -> bool:
    within = takewhile(lambda frame: not is_users(frame), frames())
    return any(frame.f_code.co_name in _TEXT for frame in within)
