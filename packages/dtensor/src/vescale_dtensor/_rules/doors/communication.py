"""torch.distributed called on DTensors, by code that was written for one process per replica.

The value of a DTensor is the global tensor's, the same on every rank. So what makes values alike (`all_reduce` of a
loss, `broadcast` of a parameter) has nothing to do: the value is counted once, and a `GlobalValueWarning` says so.
What takes a tensor for this rank's part, and gives tensors of parts back, is refused: which part is meant, only
the caller knows. Functional collectives, in which autograd takes part, are refused, too.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from itertools import islice, takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.nn import functional as differentiable
from torch.overrides import handle_torch_function

from vescale_trace.stack import frames, module_of, user_line
from vescale_trace.values import tensors_in

from ..._communication.endings import close
from ..._communication.events import function_name
from ..._conversions.convert import describe
from ..._errors import OperatorError
from ..._tensor.tensor import DTensor, local_only
from ..._torch_private import Backend, _check_tensor_list, _is_torch_function_enabled, replace_check_tensor_list
from ..registry import handler

_ALIKE = "all_reduce reduce broadcast all_reduce_coalesced".split()
_PARTS = """
    all_gather all_gather_into_tensor all_gather_single all_gather_coalesced gather gather_single gather_into_tensor
    scatter reduce_scatter reduce_scatter_tensor reduce_scatter_single all_to_all all_to_all_single send recv isend
    irecv
""".split()
_FUNCTIONAL = ("torch.distributed.nn", "torch.distributed._functional_collectives")


class GlobalValueWarning(UserWarning):
    """A collective was called on a DTensor. Its value is already global, so it was left unchanged and counted once."""


class Done:
    """Handle of a collective with nothing to do, for `async_op=True`."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def _functions(names: list[str]) -> list[Callable]:
    return [function for name in names if (function := getattr(distributed_c10d, name, None)) is not None]


@handler(_functions(_ALIKE))
def alike(function: Callable, args: tuple, kwargs: dict) -> Done | None:
    """Does nothing within the tensor's own mesh; no communication."""
    given = args[0] if args else next(kwargs[name] for name in ("tensor", "tensors") if name in kwargs)
    tensors = [t for t in (given if isinstance(given, (tuple, list)) else [given]) if type(t) is DTensor]
    name = function_name(function)
    group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
    if _is_functional():
        refuse(name, tensors)
    for tensor in tensors:
        ranks = dist.get_process_group_ranks(group)
        if not set(ranks) <= set(tensor.device_mesh.mesh.flatten().tolist()):
            refuse(name, tensors, f", and the group {ranks} has ranks outside of its mesh")
    line = user_line()
    warnings.warn(
        f"torch.distributed.{name} of a DTensor{f', at {line}' if line else ''}: its value is the global tensor's "
        "already, so it is not changed, and counted once. Do not divide it by the number of ranks.",
        GlobalValueWarning,
        stacklevel=5,
    )
    return Done() if kwargs.get("async_op") or any(a is True for a in args) else None


def _distributed(given: Any) -> list[DTensor]:
    return [tensor for tensor in tensors_in(given) if type(tensor) is DTensor]


def _handing_over(function: Callable) -> Callable:
    """A collective of torch 2.11 that asks no class of tensors, as it does from 2.13 on: DTensors are asked here."""

    @wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        found = _distributed((args, kwargs))
        if found and _is_torch_function_enabled():
            return handle_torch_function(function, found, *args, **kwargs)
        return function(*args, **kwargs)

    return collective


for _name in _ALIKE:
    if "handle_torch_function" not in inspect.unwrap(getattr(distributed_c10d, _name)).__code__.co_names:
        _collective = _handing_over(getattr(distributed_c10d, _name))
        for _module in (dist, distributed_c10d):
            setattr(_module, _name, _collective)


@handler(_functions(_PARTS))
def parts(function: Callable, args: tuple, kwargs: dict) -> None:
    refuse(function_name(function), _distributed((args, kwargs)))


@handler(Tensor.is_complex, torch.is_complex)
def asked_by_collective(function: Callable, args: tuple, kwargs: dict) -> bool:
    """Answers torch's collectives for the tensors in their lists, which do not come to `__torch_function__`."""
    around = (frame for frame in frames() if not module_of(frame).startswith("vescale_"))
    frame = next(around, None)
    if frame is not None and module_of(frame) == distributed_c10d.__name__:
        name = frame.f_code.co_name  # a comprehension is a frame of its own
        refuse(next(around).f_code.co_name if name.startswith("<") else name, [args[0]])
    with local_only():
        return function(*args)


_METHODS = """
    _allgather_base _reduce_scatter_base all_gather_single all_gather_single_coalesced all_to_all_single allgather
    allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base broadcast
    gather recv recv_anysource reduce reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced
    reduce_scatter_tensor_coalesced scatter send
""".split()


_PLAIN = frozenset({Tensor, int})
"""Types of list entries that need no check: tensors, and sizes of the parts that they are cut into."""


def _method(kind: type, name: str, original: Callable) -> Callable:
    """A method of a group, called by whoever leaves `torch.distributed` out. The engine's recipes call the original."""

    # A message costs gloo 20 us, and each comes through here: that all is plain is seen without a call.
    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        for argument in args:
            given = type(argument)
            if given is DTensor or given is list and not _PLAIN.issuperset(map(type, argument)):
                _refuse_any(f"{kind.__name__}.{name}", argument)
        for argument in kwargs.values():
            _refuse_any(f"{kind.__name__}.{name}", argument)
        return original(self, *args, **kwargs)

    return method


def _refuse_any(name: str, given: Any) -> None:
    found = _distributed(given)
    if found and _is_torch_function_enabled():
        refuse(name, found)


for _owner in (dist.ProcessGroup, Backend):
    for _name in _METHODS:
        if _name in vars(_owner):
            setattr(_owner, _name, _method(_owner, _name, getattr(_owner, _name)))


def _check_list(tensors: Any, name: str) -> None:
    """torch's own look at every list of tensors that a collective takes: `reduce_scatter` asks nothing else of them."""
    _check_tensor_list(tensors, name)
    found = [tensor for tensor in tensors if type(tensor) is DTensor]
    if found:
        refuse(list(islice(frames(), 2))[1].f_code.co_name, found)


replace_check_tensor_list(_check_list)


def _refusing(function: Callable) -> Callable:
    """A differentiable collective, which on gloo is several plain ones: refused before the first of them."""

    @wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        found = _distributed((args, kwargs))
        if found:
            refuse(f"nn.functional.{function.__name__}", found)
        return function(*args, **kwargs)

    return collective


for _name in (*_ALIKE, *_PARTS):
    if hasattr(differentiable, _name):
        _collective = _refusing(getattr(differentiable, _name))
        setattr(differentiable, _name, _collective)
        setattr(torch.distributed.nn, _name, _collective)


_FROM_ONE = ("scatter", "broadcast_object_list", "scatter_object_list")


def leave_nobody_waiting() -> None:
    """Called before an error is raised: where torch sends from this rank alone what only this rank has looked at, the
    others of the group wait for it. They get an error, too: the group's connections end."""
    for frame in frames():
        if module_of(frame) == distributed_c10d.__name__ and frame.f_code.co_name in _FROM_ONE:
            if type(frame.f_locals.get("tensor")) is not DTensor:  # else they have DTensors as well, and raise
                close(frame.f_locals.get("group"))
            return


def _is_functional() -> bool:
    """True if torch's autograd-aware collectives call: their backward would communicate once more."""
    within = takewhile(lambda name: name.startswith(("torch.", "vescale_")), map(module_of, frames()))
    return any(name.startswith(_FUNCTIONAL) for name in within)


def refuse(name: str, tensors: list[Tensor], more: str = "") -> None:
    if "scatter" in name:
        leave_nobody_waiting()
    raise OperatorError(
        f"torch.distributed.{name}",
        "takes this rank's part of a value, but the value of a DTensor is the global tensor, equal on all ranks"
        f"{more}",
        [describe("operand", tensor, tensor._layout.base) for tensor in tensors],
        [
            ("tensor.full_tensor()", "the global value as a plain tensor: nothing is left to communicate"),
            (f"torch.distributed.{name}(tensor.to_local(), ...)", "to run it on this rank's part"),
            ("tensor.redistribute(placements)", "moves shards between ranks, with gradients"),
        ],
    )


_SPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")


def refuse_operator(function: Any, tensors: list[Tensor]) -> None:
    """Raises where `function` is a collective as an operator of torch's."""
    if getattr(function, "namespace", "") in _SPACES:
        refuse(function.overloadpacket.__name__, [tensor for tensor in tensors if type(tensor) is DTensor])
