"""Parts: what each rank makes of its shard when a reduced dim is sharded, and how the parts meet.

A reduction whose parts do not simply add up (a maximum, a product, an `any`) is run
on the shard; the results, small, are gathered as rows of a new leading dim; every
rank then does the same with all of them. So its output is I on the axes that shard
a reduced dim, the gather's backward is a slice, and autograd does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from ..._conversions.convert import alias, convert_operand
from ..._dispatch.signature import Signature
from ..._layouts.layout import Layout, layout_of
from ..._layouts.state import INVARIANT, State, sharded
from ..._tensor.tensor import DTensor, attach
from ..registry import Call, Decision, decomposed

# --- arguments ----------------------------------------------------------------------


def argument(call: Call, position: int, name: str, default: Any = None, *, other: str = "") -> Any:
    """An argument under its torch name or its numpy name (`axis`, `keepdims`)."""
    if other and other in call.kwargs:
        return call.kwargs[other]
    return call.get(position, name, default)


def dims_of(value: Any, ndim: int) -> tuple[int, ...] | None:
    """Dims given as None (all), an int or a sequence, as sorted non-negative ints; None for anything else."""
    if value is None or (isinstance(value, (tuple, list)) and not value):
        return tuple(range(ndim))
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    span = max(ndim, 1)
    if not all(isinstance(v, int) and not isinstance(v, bool) and -span <= v < span for v in values):
        return None
    dims = {v % span for v in values}
    if len(dims) != len(values):
        return None
    return tuple(sorted(dims)) if ndim else ()


def source_of(args: tuple, kwargs: dict) -> Tensor:
    """The tensor that a function was called on."""
    return args[0] if args else kwargs["input"]


# --- signatures ---------------------------------------------------------------------


def reduction(call: Call, dims: Sequence[int], keepdim: bool, *, outputs: int = 1, **options: Any) -> Signature:
    """One tensor reduced over `dims` to `outputs` results; the reduced dims are whole unless `summed` says else."""
    (x,) = call.operands
    labels = tuple(range(x.ndim))
    kept = tuple(None if d in dims else d for d in labels) if keepdim else tuple(d for d in labels if d not in dims)
    options.setdefault("whole", set(dims) - set(options.get("summed", ())))
    return Signature([labels], [kept] * outputs, single=outputs == 1, **options)


def along(call: Call, dims: Sequence[int], *, outputs: int = 1) -> Signature:
    """One tensor in, results of the same shape out; `dims` whole."""
    (x,) = call.operands
    labels = tuple(range(x.ndim))
    return Signature([labels], [labels] * outputs, whole=set(dims), single=outputs == 1)


def splits(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes that shard one of `dims`, outermost first."""
    return tuple(axis for axis, state in enumerate(layout.states) if state.kind == "S" and state.dim in dims)


def only_split(call: Call, dims: Sequence[int]) -> bool:
    """True if the call has one operand, a DTensor that is not written to, and some of `dims` is sharded."""
    return len(call.operands) == 1 and not call.inplace and bool(splits(call.operands[0].layout, dims))


def dims_and_keepdim(call: Call) -> tuple[tuple[int, ...], bool] | None:
    """Returns the arguments of `f(input, dim, keepdim)`; None for another call."""
    if len(call.operands) != 1:
        return None
    dims = dims_of(argument(call, 1, "dim", other="axis"), call.operands[0].ndim)
    return None if dims is None else (dims, bool(argument(call, 2, "keepdim", False, other="keepdims")))


def reducing(
    call: Call, dims: Sequence[int], keepdim: bool, run: Callable[[DTensor], Any], *, outputs: int = 1
) -> Signature | Decision:
    """One tensor in, `dims` reduced: by each rank for itself where they are whole, where one is sharded by `run`, of
    the DTensor."""
    if not only_split(call, dims):
        return reduction(call, dims, keepdim, outputs=outputs)
    return decomposed(lambda *args, **kwargs: run(source_of(args, kwargs)))


# --- at run time --------------------------------------------------------------------


def reduced(x: DTensor, function: object) -> DTensor:
    """`x` with its partial axes summed (I): an all-reduce per partial axis, none otherwise."""
    layout = x._layout.base
    return convert_operand(x, layout, layout.reduced, function) if layout.is_partial else x


def plain(x: DTensor) -> Tensor:
    """The shard, differentiable."""
    return alias(x)


def attached(local: Tensor, layout: Layout) -> DTensor:
    """A DTensor over a result of plain tensors, differentiable."""
    return attach(alias(local), layout if is_grad_enabled() else layout.untracked)


def reduced_layout(layout: Layout, dims: Sequence[int], keepdim: bool) -> Layout:
    """The layout of a reduction over `dims`: I on the axes that shard one of them."""
    shape, place = [], {}
    for d, size in enumerate(layout.shape):
        if d not in dims:
            place[d] = len(shape)
            shape.append(size)
        elif keepdim:
            shape.append(1)

    def moved(state: State) -> State:
        if state.kind != "S":
            return state
        return state.at(place[state.dim]) if state.dim in place else INVARIANT

    return layout_of(layout.mesh, [moved(state) for state in layout.states], shape)


def rows(
    part: Tensor, layout: Layout, axes: Sequence[int], function: object, *, state: State = INVARIANT
) -> Tensor:
    """[n, *part.shape]: the parts of all ranks of `axes`, in order of their shards. Differentiable.

    `layout` is that of one part; its states on `axes` do not count. Cost: an all-gather
    of the part per axis; backward: a slice, or with `state` R, for ranks that go on to
    do different things with the rows, a reduce-scatter.
    """
    mesh = layout.mesh
    count = prod(mesh.sizes[axis] for axis in axes)
    states = [s.at(s.dim + 1) if s.kind == "S" else s for s in layout.states]
    shape = (count, *layout.shape)
    source = layout_of(mesh, [sharded(0) if axis in axes else s for axis, s in enumerate(states)], shape)
    target = layout_of(mesh, [state if axis in axes else s for axis, s in enumerate(states)], shape)
    return alias(convert_operand(attach(alias(part.unsqueeze(0)), source), source, target, function))


def combined(
    x: DTensor, dims: Sequence[int], keepdim: bool, function: object,
    part: Callable[[Tensor], Tensor], combine: Callable[[Tensor], Tensor],
) -> DTensor:  # fmt: skip
    """`combine` of the rows that `part` makes of every rank's shard; both on plain tensors."""
    x = reduced(x, function)
    layout = x._layout.base
    out = reduced_layout(layout, dims, keepdim)
    return attached(combine(rows(part(plain(x)), out, splits(layout, dims), function)), out)


def positions(layout: Layout, dim: int, device: torch.device) -> Tensor:
    """The global index of each index of this rank's shard along `dim`. int64, ascending."""
    ranges = layout.region_at(layout.mesh.coordinate)[dim]
    if len(ranges) == 1:
        return torch.arange(*ranges[0], device=device)
    spans = [torch.arange(start, stop, device=device) for start, stop in ranges]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64, device=device)
