"""Results of local calls under the strides that tell one device's order in memory.

An elementwise function gives its result the order of its operands. To a kernel a shard that has one index of a dim is
contiguous though the whole is permuted, and so is its result: what is drawn by its order would be other numbers than
one device's. So where a dim is cut to one index the strides of what was given are looked at, and if they are not those
of a fresh tensor, the function is asked, on tensors without data that lie as one device's, how its result lies there.
The same is done for what merges and splits dims, and for what permutes them, where two are cut so: which of equal
strides is the inner, they do not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_trace.values import fill, tensors_in

from .._layouts.layout import Layout
from .._layouts.strides import cut_to_one, global_stride, local_stride, row_major
from .._rules.elements.pointwise import FUNCTIONS as ELEMENTWISE
from .._tensor.tensor import plain_data, set_plain_data
from .._torch_private import without_dispatch_modes

_PERMUTING = frozenset({
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in "permute transpose swapaxes swapdims t adjoint movedim moveaxis".split()
} | {getattr(Tensor, name).__get__ for name in "T H mT mH".split()})  # fmt: skip
# Kernels that lay their results out by their operands', and what gives dims of one index the stride of a neighbor.
_LAYING = ELEMENTWISE | {F.rms_norm, torch.rms_norm} | {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in "reshape view flatten unflatten".split()
    if hasattr(owner, name)
}  # fmt: skip
_MOST = 64  # strides that are remembered by a decision


def in_order(
    function: Callable, run: Callable, given: Sequence[Layout], out: Layout, places: Sequence[int] | None, alone: bool
) -> Callable:
    """`run`, a local call on tensors that lie as `given`; its result, of the layout `out`, has strides that tell.

    `places`: of the tensors among its arguments; None if some are in lists, or have names. `alone`: no other arguments.
    Free where no dim is cut to one index. Else a look at the strides of what is given.
    """
    if out.ndim < 2 or any(layout.flat_axis is not None for layout in (out, *given)):
        return run
    most = max(len(cut_to_one(layout)) for layout in given)
    if not most or function not in _LAYING and (most < 2 or function not in _PERMUTING):
        return run
    plain = tuple(row_major(layout.local_shape) for layout in given)
    known: dict[tuple, tuple[int, ...]] = {}  # strides of the result, and of what was given -> those to give it
    right: set[tuple] = set()  # of those that are as they are to be

    def look(result: Tensor, tensors: Sequence[Tensor], args: tuple, kwargs: dict) -> tuple[int, ...] | None:
        if _is_given(result, tensors):
            return None
        if function in _LAYING and plain == tuple(tensor.stride() for tensor in tensors):
            return None
        wanted = _wanted(function, args, kwargs, tensors, given, out)
        return wanted if wanted is not None and _may_lay(result, wanted) else None

    def laid(result: Tensor, key: tuple, tensors: Sequence[Tensor], args: tuple, kwargs: dict) -> Tensor:
        """Lays out a result as strides require that are met for the first time, or that give the result others."""
        wanted = known.get(key)
        if wanted is None:
            if len(known) + len(right) >= _MOST:
                known.clear(), right.clear()
            wanted = look(result, tensors, args, kwargs)
            if wanted is None:
                right.add(key)
                return result
            known[key] = wanted
        set_plain_data(result, plain_data(result).as_strided(result.shape, wanted))
        return result

    strides = Tensor.stride
    # Most calls have one tensor, or two, and strides that need nothing: that is written out.
    if places == [0, 1] and alone:

        def run_in_order(tensor: Tensor, other: Tensor) -> Any:
            result = run(tensor, other)
            if result is NotImplemented:
                return result
            key = (strides(result), strides(tensor), strides(other))
            return result if key in right else laid(result, key, (tensor, other), (tensor, other), {})

    elif places == [0]:

        def run_in_order(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = run(tensor, *args, **kwargs)
            if result is NotImplemented:
                return result
            key = (strides(result), strides(tensor))
            return result if key in right else laid(result, key, (tensor,), (tensor, *args), kwargs)

    else:

        def run_in_order(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            if result is NotImplemented:
                return result
            tensors = [args[place] for place in places] if places is not None else tensors_in((args, kwargs))
            key = (strides(result), *map(strides, tensors))
            return result if key in right else laid(result, key, tensors, args, kwargs)

    return run_in_order


def _wanted(
    function: Callable, args: tuple, kwargs: dict, tensors: Sequence[Tensor], given: Sequence[Layout], out: Layout
) -> tuple[int, ...] | None:
    """The shard's strides of what `function` makes on one device; None if that cannot be told."""
    likes = []
    for tensor, layout in zip(tensors, given):
        whole = global_stride(tensor.stride(), tensor.shape, layout)
        if whole is None or tuple(tensor.shape) != layout.local_shape:
            return None
        likes.append(torch.empty_strided(layout.shape, whole, dtype=tensor.dtype, device="meta"))
    args, kwargs = fill((args, kwargs), likes)
    try:
        with torch.no_grad(), without_dispatch_modes():
            made = function(*args, **kwargs)
    except (RuntimeError, TypeError):  # of a kernel that wants data
        return None
    return local_stride(made.stride(), out) if tuple(made.shape) == out.shape else None


def _is_given(result: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(result is tensor for tensor in tensors)


def _may_lay(result: Tensor, wanted: tuple[int, ...]) -> bool:
    """True if these are other strides, and for dims of one index alone."""
    own = result.stride()
    return own != wanted and all(one == other for one, other, size in zip(own, wanted, result.shape) if size > 1)
