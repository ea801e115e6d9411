"""Numbers: tensors of one element that is partial or another rank's, and C++ that reads them.

`torch.full((3,), p)`, `torch.arange(p)`, `plain.narrow(0, 0, p)`, `torch.tensor(p)` take a tensor as a number, or as
data, and read it in C++ without asking `__torch_function__`: each rank would take its own part for the sum. So a
DTensor of one element that is not replicated, and no other tensor, carries torch's Python dispatch key (`attach`), and
all that reaches its memory comes to `below_dispatch`. Dispatch is disabled there when the engine's own local run does
it, and the part is meant; else somebody below the engine reads it, and is handed the value (a collective of one
number, on every rank, as for `item()`).

Per function on such a tensor this costs a few microseconds, one autograd node included. There are two or three of
them in a step: a loss is reduced when it leaves the root module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_trace.values import map_tensors, tensors_in

from .._conversions.convert import describe
from .._conversions.reading import convert_to_read
from .._errors import OperatorError
from .._rules.doors.communication import refuse_operator
from .._tensor.tensor import DTensor, local_only
from .._torch_private import (
    TorchDispatchMode,
    _current_graph_task_id,
    _DisableTorchDispatch,
    _is_torch_function_enabled,
)

# What reads a value or hands it on, and is in no formula of a backward that such a number may take part in.
_READS = {
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default,
    torch.ops.aten._to_copy.default, torch.ops.aten.clone.default,
}  # fmt: skip


def below_dispatch(cls: type, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """`DTensor.__torch_dispatch__`, which only numbers reach."""
    kwargs = kwargs or {}
    if not _is_value_meant(function):
        with _DisableTorchDispatch():
            return function(*args, **kwargs)
    args, kwargs = _with_values(function, args, kwargs)
    with _DisableTorchDispatch():
        return function(*args, **kwargs)


def under_mode(mode: TorchDispatchMode, function: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """Answers for a mode of ours, for an operator that somebody below the engine gives such a number; NotImplemented if
    there is none. A mode hears of it before the number does, and to disable torch functions, as ours do first, would
    say that the part is meant. The mode sees what reads the value."""
    if DTensor not in types or not _is_value_meant(function):
        return NotImplemented
    TorchDispatchMode.__enter__(mode)  # alone: what a mode of ours enters beside torch's is entered
    try:
        args, kwargs = _with_values(function, args, kwargs)
        return function(*args, **kwargs)
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


def _is_value_meant(function: Any) -> bool:
    """True if the caller is not the engine, in its own local run, nor a backward."""
    return _is_torch_function_enabled() and (_current_graph_task_id() == -1 or function in _READS)


def _with_values(function: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Operands, with plain values in place of such numbers. A collective of one number each."""
    refuse_operator(function, [tensor for tensor in tensors_in((args, kwargs)) if type(tensor) is DTensor])
    if function._schema.is_mutable:
        _refuse(function, tensors_in((args, kwargs)))
    return map_tensors((args, kwargs), _full(function))


def _full(function: Any) -> Any:
    def full(tensor: Tensor) -> Tensor:
        if type(tensor) is not DTensor:
            return tensor
        layout = tensor._layout.base
        whole = tensor if layout.is_replicated else convert_to_read(tensor, function)
        with local_only():
            return whole.as_subclass(Tensor)

    return full


_SIZED = """
    view reshape expand broadcast_to repeat tile roll narrow narrow_copy topk split split_with_sizes chunk unflatten
    flatten unsqueeze squeeze select permute movedim moveaxis transpose swapaxes swapdims unbind unfold diagonal tril
    triu new_zeros new_ones new_empty new_full zeros ones empty full eye arange linspace logspace randperm resize_
""".split()
# Functions whose first argument at most is a tensor: what else is a tensor is a size, a dim or a value.
TAKE_NUMBERS = {
    function: 0 if owner is torch and not hasattr(Tensor, name) else 1
    for name in _SIZED
    for owner in (torch, Tensor)
    if (function := getattr(owner, name, None)) is not None
}
_FIRST = ("self", "input")


def with_numbers(function: Callable) -> Callable:
    """`function`, with tensors of one element read where it takes numbers: a collective each, if not replicated."""
    first = TAKE_NUMBERS[function]

    def run(*args: Any, **kwargs: Any) -> Any:
        rest = [map_tensors(argument, _read) for argument in args[first:]]
        named = {name: item if name in _FIRST else map_tensors(item, _read) for name, item in kwargs.items()}
        return function(*args[:first], *rest, **named)

    return run


def _read(tensor: Tensor) -> Any:
    return tensor.item() if tensor.numel() == 1 else tensor


def takes_number(function: Callable, args: tuple, kwargs: dict) -> bool:
    """True if this call gives a tensor of one element where `function` takes a number."""
    first = TAKE_NUMBERS.get(function)
    if first is None:
        return False
    named = [item for name, item in kwargs.items() if name not in _FIRST]
    return any(tensor.numel() == 1 for tensor in tensors_in((args[first:], named)))


def _refuse(function: Any, tensors: list[Tensor]) -> None:
    raise OperatorError(
        function.overloadpacket.__name__,
        "writes, below the engine, to a number of which each rank holds only a part",
        [describe("operand", tensor, tensor._layout) for tensor in tensors if type(tensor) is DTensor],
        [
            ("tensor.full_tensor()", "the value, plain: a collective of one number"),
            ("tensor.to_local()", "this rank's part"),
        ],
    )


DTensor.__torch_dispatch__ = classmethod(below_dispatch)
