"""`out=` forms, and in-place forms on a tensor that cannot take the result as it lies, by way of the plain form.

out=                  run without it, then `out.copy_(result)`: `out` keeps its layout
in place, partial     self is reduced, written in place, and put back partial (on the first rank: free)
in place, plain       self, which all ranks hold alike, is written as the DTensor that it is (I); where a gradient is to
                      flow through it, it is one from there on, the same object; and where `copy_` puts a shard over all
                      of it (what a cache keeps of a convolution's input), and nobody else sees its memory, it is cut
                      as that is: nothing is gathered
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from vescale_trace.values import tensors_in

from .._conversions.convert import convert
from .._layouts.layout import Layout, layout_of
from .._layouts.mesh import Mesh
from .._layouts.state import INVARIANT
from .._rules.registry import Call, Decision, Operand, decomposed
from .._tensor.tensor import DTensor, attach, local_only
from .._torch_private import _storage_Use_Count
from .fallback import gathered
from .signature import Signature, solve


def out_form(function: Callable) -> Decision:
    """`function(..., out=...)` for a function that has a rule."""

    def run(*args: Any, out: Any, **kwargs: Any) -> Any:
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        if is_grad_enabled() and any(t.requires_grad for t in (*outs, *args) if isinstance(t, Tensor)):
            return gathered(function)(*args, out=out, **kwargs)  # torch says why it refuses
        result = function(*args, **kwargs)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(outs) != len(results) or not all(_takes(o, r) for o, r in zip(outs, results)):
            return gathered(function)(*args, out=out, **kwargs)  # another size or type: as torch treats it
        for one, value in zip(outs, results):
            one.copy_(value)
        if isinstance(result, tuple) and type(result) is not tuple:  # torch.return_types.max and the like
            return type(result)(outs)
        return out

    return decomposed(run)


def _takes(out: Tensor, value: Tensor) -> bool:
    return type(out) is DTensor and out.shape == value.shape and torch.can_cast(value.dtype, out.dtype)


def plain_in_place(function: Callable) -> Decision:
    """An in-place `function` on a plain tensor, with DTensors among its other operands."""

    def run(own: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = tensors_in((args, kwargs))
        mesh = next(tensor._layout.mesh for tensor in given if type(tensor) is DTensor)
        if is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            if function is Tensor.copy_ and _is_replaced(own, args[0]):
                _cut_alike(own, args[0])
                return function(own, *args, **kwargs)
            for tensor in (own, own._base):  # what is written through a view is the view's base
                if type(tensor) is Tensor:
                    attach(tensor, _invariant(tensor, mesh))
            return function(own, *args, **kwargs)
        with local_only():
            view = attach(own.detach(), _invariant(own, mesh).untracked)
        out = function(view, *args, **kwargs)
        return own if out is view else out

    return decomposed(run)


def _is_replaced(own: Tensor, source: Any) -> bool:
    """True if all of `own` is written by what is cut, and is nobody else's memory."""
    if type(own) is not Tensor or own._base is not None or own.requires_grad or type(source) is not DTensor:
        return False
    if own.shape != source.shape or not own.is_contiguous() or not _cuts(source._layout):
        return False
    storage = own.untyped_storage()
    is_all = storage.nbytes() == own.numel() * own.element_size()
    return is_all and _storage_Use_Count(storage._cdata) <= 2  # `own`, and the handle just made


def _cuts(layout: Layout) -> bool:
    return any(state.is_sharded for state in layout.states) and all(state.kind in "SIRP" for state in layout.states)


def _cut_alike(own: Tensor, source: DTensor) -> None:
    """`own`, with memory for this rank's part, is a DTensor cut as `source` is; its values are to be written."""
    layout = source._layout
    states = tuple(state if state.is_sharded else INVARIANT for state in layout.states)
    with local_only():
        own.data = own.new_empty(source.size())
        attach(own, layout_of(layout.mesh, states, layout.shape))


def _invariant(tensor: Tensor, mesh: Mesh) -> Layout:
    return layout_of(mesh, (INVARIANT,) * mesh.ndim, tuple(tensor.shape))


def partial_in_place(call: Call, signature: Signature) -> Decision | None:
    """Decides an in-place call that self's layout forbids because self is partial; None if that is not why."""
    own = call.operands[0]
    if not own.layout.is_partial or not (call.args and call.args[0] is own):
        return None
    reduced = own.layout.reduced
    operands = [Operand(reduced, False, own.index), *call.operands[1:]]
    if solve(Call(call.function, call.args, call.kwargs, operands, call.mesh, True), signature) is None:
        return None
    return decomposed(_put_back(call.function, reduced))


def _put_back(function: Callable, reduced: Layout) -> Callable:
    def run(own: DTensor, *args: Any, **kwargs: Any) -> Any:
        fresh = convert(own, reduced, function).clone()
        if function(fresh, *args, **kwargs) is NotImplemented:  # an operator that does not take its other operand
            return NotImplemented
        return own.copy_(fresh)

    return run
