"""A function without a rule: gather, run whole, and put back what was written.

Inputs are made I (whole and alike on every rank), the function runs on full tensors
as on one device, its results are I. Slow and right. What the function wrote in place
(its first argument, `out=`, what its schema says, or anything whose version it bumped) is sliced back to
the shards it came from. Reported once per function, with its cost.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from vescale_trace.stack import user_line
from vescale_trace.values import map_tensors

from .._communication.events import function_name
from .._conversions.convert import alias, convert_operand, describe
from .._errors import OperatorError
from .._layouts.layout import layout_of
from .._layouts.state import INVARIANT
from .._rules.registry import is_inplace
from .._tensor.stand_in import standing_in
from .._tensor.tensor import DTensor, attach, local_only
from .._torch_private import OpOverload, OpOverloadPacket
from .contracts import mark_full
from .copies import check_writable, mark_copy


class FallbackWarning(UserWarning):
    """A function ran on gathered tensors because it has no rule, or, in the reproducible mode, no canonical form."""


reported: set[Any] = set()  # (function, what it lacks) that were warned of, each once


def gathered(function: Callable, *, local: Callable | None = None, lacks: str = "rule") -> Callable:
    """`function` on whole tensors: takes and returns DTensors. Says so once per function, with what it costs.

    local: what runs in its place. lacks: why it runs whole.
    """
    local = local or function
    is_users = "function" in getattr(function, "__dict__", ())  # an autograd Function's, which may look at objects

    def run(*args: Any, **kwargs: Any) -> Any:
        targets = _written_by_name(function, args, kwargs) + _written_by_schema(function, args, kwargs)
        gathered_operands: list[tuple[DTensor, Tensor, int]] = []
        plains: list[Tensor] = []

        def gather(tensor: Tensor) -> Tensor:
            if type(tensor) is not DTensor:
                plains.append(tensor)
                return tensor
            for source, full, _ in gathered_operands:
                if source is tensor:  # the same object twice stays the same object
                    return full
            layout = tensor._layout.base
            full = alias(convert_operand(tensor, layout, layout.invariant, function))
            if any(tensor is target for target in targets):
                check_writable(function, tensor, through=True)
                full = full.clone()  # an Alias refuses to be written, and a remembered conversion must not be
            if is_users:
                full = mark_full(standing_in(full, tensor))
            gathered_operands.append((tensor, full, _version(full)))
            return full

        full_args, full_kwargs = map_tensors(args, gather), map_tensors(kwargs, gather)
        _report(function, gathered_operands, lacks)
        try:
            with contextlib.nullcontext() if is_users else local_only():  # a user's calls modules that hold DTensors
                out = local(*full_args, **full_kwargs)
        except Exception as error:
            for index, (source, _, _) in enumerate(gathered_operands):
                error.add_note(describe(f"operand {index}", source, source._layout))
            raise
        with local_only():
            written: dict[int, DTensor] = {}
            for source, full, version in gathered_operands:
                if _version(full) != version or any(source is target for target in targets):
                    written[id(full)] = source
                    _write_back(function, source, full)
        return map_tensors(out, lambda one: _attached(one, gathered_operands, written, plains))

    return run


# Where functions take running statistics, which they write without telling the version counter.
_STATISTICS = {
    **dict.fromkeys((F.batch_norm, F.instance_norm, torch.batch_norm_update_stats), (1, 2)),
    **{
        getattr(torch, name): (3, 4)
        for name in "batch_norm instance_norm native_batch_norm cudnn_batch_norm miopen_batch_norm "
        "_batch_norm_impl_index batch_norm_gather_stats batch_norm_gather_stats_with_counts".split()
        if hasattr(torch, name)
    },
}


def _written_by_schema(function: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """Returns the tensors that an operator of a library writes to: its kernel need not tell the version counter."""
    if isinstance(function, OpOverloadPacket):
        overloads = [getattr(function, name) for name in function.overloads()]
    else:
        overloads = [function] if isinstance(function, OpOverload) else []
    found: list[Tensor] = []
    for overload in overloads:
        for position, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                is_positional = position < len(args) and not argument.kwarg_only
                given = args[position] if is_positional else kwargs.get(argument.name)
                found += [one for one in (given if isinstance(given, (list, tuple)) else [given]) if one is not None]
    return found


def _written_by_name(function: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """Returns the tensors that a function writes to, by torch's naming. (All else it writes to is known by its
    version.)"""
    out = kwargs.get("out")
    found = [*out] if isinstance(out, (tuple, list)) else [] if out is None else [out]
    if is_inplace(function) or kwargs.get("inplace") is True:
        found.append(args[0] if args else next(iter(kwargs.values())))
    for position, name in zip(_STATISTICS.get(function, ()), ("running_mean", "running_var")):
        found.append(args[position] if position < len(args) else kwargs.get(name))
    return found


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _write_back(function: Callable, target: DTensor, full: Tensor) -> None:
    """The shard of `full` into `target`, differentiable."""
    layout = target._layout.base
    if tuple(full.shape) != layout.shape:  # resize_, out= of another size
        if full.requires_grad:
            raise OperatorError(
                function_name(function),
                f"in place to another shape, {list(full.shape)}, on a tensor with gradient",
                [describe("tensor", target, layout)],
                [("the function that returns a new tensor", "")],
            )
        fresh = layout_of(layout.mesh, (INVARIANT,) * layout.mesh.ndim, tuple(full.shape))
        target.set_(full.detach())
        target._layout = fresh
        return
    if full.data_ptr() == target.data_ptr() and layout.is_replicated and not full.requires_grad:
        return
    check_writable(function, target, through=True)
    source = attach(full.detach() if not full.requires_grad else alias(full), layout.invariant)
    target.copy_(convert_operand(source, layout.invariant, layout, "write-back"))


def _attached(out: Tensor, gathered_operands: list, written: dict[int, DTensor], plains: list[Tensor]) -> Tensor:
    if id(out) in written:
        return written[id(out)]
    if any(out is plain for plain in plains):
        return out
    if type(out) is not Tensor or any(out is full for _, full, _ in gathered_operands):
        out = alias(out)
    if out.layout is torch.strided:
        for source, full, _ in gathered_operands:
            if share(out, full) and not share(full, source):  # a view, on one device: a write must not be lost
                out = mark_copy(out, source)
    mesh = gathered_operands[0][0]._layout.mesh
    layout = layout_of(mesh, (INVARIANT,) * mesh.ndim, tuple(out.shape))
    return attach(out, layout if is_grad_enabled() else layout.untracked)


def share(one: Tensor, other: Tensor) -> bool:
    """True if two tensors lie in one storage."""
    with local_only():
        if one.layout is not torch.strided or other.layout is not torch.strided:
            return False
        return one.untyped_storage()._cdata == other.untyped_storage()._cdata


_REMEDIES = {
    "rule": "register_rule({name}) tells how it shards.",
    "form on flat shards": "What computes every element by itself has one: register_rule({name}, traits=...).",
    "canonical form": "In the reproducible mode every rank then computes the whole, as one device does.",
}


def _report(function: Callable, gathered_operands: list, lacks: str) -> None:
    if (function, lacks) in reported:
        return
    moved = sum(layout.numel for layout in (s._layout for s, _, _ in gathered_operands) if not layout.is_replicated)
    if moved:
        reported.add((function, lacks))
        name, line = function_name(function), user_line()
        warnings.warn(
            f"{name} has no {lacks}: its sharded inputs are gathered ({moved} elements in this call"
            f"{f', at {line}' if line else ''}). {_REMEDIES[lacks].format(name=name)}",
            FallbackWarning,
            stacklevel=4,
        )
