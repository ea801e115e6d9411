"""Indices with tensors: `x[i]`, `x[:, i, None, j]`, `x[mask]`, assignment to them, index_put, index_select.

An index is taken apart as torch does: first the integers, slices and None (`index_items`),
then all index tensors together, through `take_dims` or `put_dims`.

    dims without an index tensor    keep their sharding
    index tensor sharded            the result is sharded there, x whole
    indexed dim sharded, reading    partial where the result is smaller than x: every rank gives the rows it
                                    has, zeros for the others; whole first where it is not
    indexed dim sharded, writing    every rank writes the rows it has
    bool mask                       its positions are data: the mask is made whole, then as index tensors
    partial input                   partial

A 0-dim integer tensor is read and counts as an integer, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._conversions.convert import convert_operand
from ..._dispatch.dispatch import call as dispatched
from ..._dispatch.fallback import gathered
from ..._dispatch.signature import Signature, solve
from ..._dispatch.sums import parted
from ..._layouts.layout import layout_of
from ..._tensor.tensor import DTensor, attach, local_only
from ..elements.pointwise import broadcast
from ..registry import Call, Decision, Operand, decomposed, rule
from ..solvers.rows import Rows, is_contiguous_cut, nonempty
from .index_items import align, enters_here, is_alias

_MASKS = (torch.bool, torch.uint8)
_INDICES = (torch.int64, torch.int32)


# --- taking an index apart ------------------------------------------------------------


def resolve(x: Tensor, index: Any) -> tuple[tuple, list[tuple[int, Tensor]]] | None:
    """The basic part of an index, and its tensors by the dim they have after that part. None: leave it to torch."""
    items = _items(x, index)
    if items is None:
        return None
    used = sum(_width(item) for item in items)
    if used > x.ndim or sum(item is Ellipsis for item in items) > 1:
        return None
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (x.ndim - used)
    basic, tensors, position = [], [], 0
    shape = x.shape
    for item in items:
        if isinstance(item, Tensor):
            width, dim = _width(item), sum(entry is not None for entry in basic)
            if item.dtype in _MASKS and item.shape != shape[dim : dim + width]:
                return None
            tensors.append((position, item))
            basic += [slice(None)] * width
            position += width
        else:
            basic.append(item)
            position += item is None or isinstance(item, slice)
    return tuple(basic), tensors


def _items(x: Tensor, index: Any) -> list | None:
    """The entries of an index: tensors, integers, slices, None and Ellipsis only."""
    if isinstance(index, list) and len(index) < 32 and any(_is_entry(item) for item in index):
        index = tuple(index)  # torch takes a list of anything but numbers for a tuple
    items = []
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, slice):
            bounds = (item.start, item.stop, item.step)
            if not all(bound is None or hasattr(bound, "__index__") for bound in bounds):
                return None
            item = slice(*[None if bound is None else int(bound) for bound in bounds])
        elif isinstance(item, bool):
            return None
        elif item is not None and item is not Ellipsis and not isinstance(item, Tensor):
            if not hasattr(item, "__index__") or hasattr(item, "ndim"):
                item = _as_tensor(item, x)
            if item is None:
                return None
        if isinstance(item, Tensor):
            if item.dtype not in (_INDICES if not item.ndim else _MASKS + _INDICES):
                return None
            if not item.ndim:
                item = int(item.item())
        items.append(item)
    return items


def _is_entry(item: Any) -> bool:
    return item is None or item is Ellipsis or isinstance(item, (slice, list, tuple, Tensor)) or hasattr(item, "ndim")


def _as_tensor(item: Any, x: Tensor) -> Tensor | None:
    try:
        if _holds_tensor(item):
            return None
        tensor = torch.as_tensor(item, device=x.device)
    except (TypeError, ValueError, RuntimeError):
        return None
    return tensor.long() if not tensor.numel() else tensor


def _holds_tensor(item: Any) -> bool:
    return isinstance(item, Tensor) or (isinstance(item, (list, tuple)) and any(map(_holds_tensor, item)))


def _width(item: Any) -> int:
    """Returns how many dims of the tensor an entry of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype in _MASKS else 1


def expanded(tensors: list[tuple[int, Tensor]]) -> tuple[tuple[int, ...], list[Tensor]]:
    """Dims and integer tensors, one each: a mask is as many tensors as it has dims."""
    dims, indices = [], []
    for position, tensor in tensors:
        parts = (tensor,) if tensor.dtype in _INDICES else true_positions(tensor)
        dims += range(position, position + len(parts))
        indices += parts
    return tuple(dims), indices


def true_positions(mask: Tensor) -> tuple[Tensor, ...]:
    """Returns where a mask is true, per dim, the same on every rank. Gathers a sharded mask."""
    if type(mask) is DTensor:
        layout = mask._layout.base
        mask = convert_operand(mask, layout, layout.invariant, Tensor.__getitem__)
        with local_only():
            found = mask.nonzero(as_tuple=True)
        return tuple(attach(one, layout_of(layout.mesh, layout.invariant.states, tuple(one.shape))) for one in found)
    return mask.nonzero(as_tuple=True)


def _is_trivial(basic: tuple) -> bool:
    return all(isinstance(item, slice) and item == slice(None) for item in basic)


# --- user calls: decompositions -------------------------------------------------------


def read_tensors(x: Tensor, index: Any) -> Tensor:
    """`x[index]`, the index not basic."""
    found = resolve(x, index)
    if found is None:
        return gathered(Tensor.__getitem__)(x, index)
    basic, tensors = found
    if not tensors:
        return x[basic]
    dims, indices = expanded(tensors)
    x = parted(x, Tensor.__getitem__)
    return _run(take_dims, x if _is_trivial(basic) else x[basic], dims, *indices)


def write_tensors(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`, the index not basic."""
    found = resolve(x, index)
    if found is None:
        return gathered(Tensor.__setitem__)(x, index, value)
    basic, tensors = found
    if not tensors:
        x[basic] = value
        return None
    if type(x) is DTensor and not is_alias(x._layout, basic):
        return gathered(Tensor.__setitem__)(x, index, value)
    view = x if _is_trivial(basic) else x[basic]
    position, mask = tensors[0]
    if len(tensors) == 1 and mask.dtype in _MASKS and _is_fill(value, x):
        trailing = view.ndim - position - mask.ndim
        view.masked_fill_((mask if mask.dtype is torch.bool else mask.bool())[(..., *[None] * trailing)], value)
        return None
    dims, indices = expanded(tensors)
    _run(put_dims, view, dims, value, False, *indices)
    return None


def _run(function, x: Tensor, *args: Any) -> Tensor:
    """`function` through its rule, if there is any DTensor left to decide about."""
    if any(type(one) is DTensor for one in (x, *args)):
        return dispatched(function, x, *args)
    return function(x, *args)


def _is_fill(value: Any, x: Tensor) -> bool:
    """True if masked_fill_ takes the value as assignment does: one number that needs no conversion."""
    if isinstance(value, Tensor):
        return not value.ndim and value.dtype == x.dtype
    if isinstance(value, int):
        return isinstance(value, bool) or x.dtype is not torch.bool
    return x.is_floating_point()


@rule(torch.index_put, Tensor.index_put, torch.index_put_, Tensor.index_put_)
def index_put(call: Call):
    """Puts values, in place or not; bool indices too."""
    put = put_dims if call.inplace else with_put

    def run(x: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False) -> Tensor:
        found = resolve(x, tuple(indices))
        if found is None or not _is_trivial(found[0]):
            return gathered(call.function)(x, indices, values, accumulate)
        dims, tensors = expanded(found[1])
        out = _run(put, x, dims, values, accumulate, *tensors)
        return x if call.inplace else out

    return decomposed(run)


# --- index tensors only -----------------------------------------------------------------


def take_dims(x: Tensor, dims: tuple[int, ...], *indices: Tensor) -> Tensor:
    """`x[:, i, :, j]`: `indices` at `dims`."""
    index: list = [slice(None)] * x.ndim
    for dim, tensor in zip(dims, indices):
        index[dim] = tensor
    return x[tuple(index)]


def put_dims(x: Tensor, dims: tuple[int, ...], value: Any, accumulate: bool, *indices: Tensor) -> Tensor:
    """`x[:, i, :, j] = value`, or `+=` with all duplicates counted."""
    index: list = [None] * x.ndim
    for dim, tensor in zip(dims, indices):
        index[dim] = tensor
    value = value.to(x) if isinstance(value, Tensor) else torch.as_tensor(value, device=x.device).to(x.dtype)
    ndim = x.ndim - len(dims) + max(tensor.ndim for tensor in indices)
    while value.ndim > ndim:
        value = value.squeeze(0)
    return torch.ops.aten.index_put_(x, index, value, accumulate)


def with_put(x: Tensor, dims: tuple[int, ...], value: Any, accumulate: bool, *indices: Tensor) -> Tensor:
    """`put_dims` on a copy."""
    return put_dims(x.clone(), dims, value, accumulate, *indices)


take_dims.__name__ = take_dims.__qualname__ = "__getitem__"  # what reports call them, and what is in place
put_dims.__name__ = put_dims.__qualname__ = "__setitem__"
with_put.__name__ = with_put.__qualname__ = "index_put"


def index_position(dims: Sequence[int]) -> int:
    """Returns the position of the index tensors' dims in the result: in place when adjacent, else in front."""
    return dims[0] if list(dims) == list(range(dims[0], dims[0] + len(dims))) else 0


def taking(call: Call, dims: tuple[int, ...]) -> Decision | None:
    """Operand 0 indexed at `dims` by the other operands together."""
    x, indices = call.operands[0], call.operands[1:]
    found = broadcast(indices)
    if found is None:
        return None
    named, index_labels, index_shape = found
    kept = [dim for dim in range(x.ndim) if dim not in dims]
    result = prod(index_shape) * prod(x.shape[dim] for dim in kept)
    small = 2 * result <= x.layout.numel
    labels: list = [
        dim if dim in kept else ("row", dim) if small and is_contiguous_cut(x, dim) else None for dim in range(x.ndim)
    ]
    at = index_position(dims)
    output = (*kept[:at], *index_labels, *kept[at:])
    shape = (*(x.shape[dim] for dim in kept[:at]), *index_shape, *(x.shape[dim] for dim in kept[at:]))
    rows = {label for label in labels if isinstance(label, tuple)}
    decision = solve(call, Signature([tuple(labels), *named], [output], rows, linear=[(0,)], shapes=[shape]))
    source = decision.targets[0] or x.layout
    if any(source.axes_of(dim) for dim in dims):
        decision.run = _masked_reader(
            Rows(source, dims, negative=call.function is take_dims), at, x.ndim - len(dims) - at
        )
    return decision


def _masked_reader(rows: Rows, at: int, trailing: int):
    def run(x: Tensor, _: object, *indices: Tensor) -> Tensor:
        shifted, inside = rows.local(indices, x.device)
        out = take_dims(nonempty(x, rows.dims), rows.dims, *rows.within(shifted))
        return out.masked_fill(~inside.reshape(*inside.shape, *[1] * trailing), 0)

    return run


@rule(take_dims)
def take(call: Call):
    dims = call.args[1]
    x = call.operands[0]
    return taking(call, dims) if x is call.args[0] and len(call.operands) == len(dims) + 1 else None


@rule(torch.index_select, Tensor.index_select)
def index_select(call: Call):
    if call.kwargs:
        return decomposed(lambda x, dim, index: x.index_select(dim, index)) if "input" not in call.kwargs else None
    (x, index), dim = call.operands, call.args[1]
    if not x.ndim or index.ndim != 1 or not -x.ndim <= dim < x.ndim:
        return None
    return taking(call, (dim % x.ndim,))


@rule(put_dims, with_put)
def put(call: Call):
    """Never moves a tensor that is written to in place."""
    x, dims, value = call.args[:3]
    has_value = isinstance(value, Operand)
    found = broadcast(call.operands[1 + has_value :])
    if found is None:
        return None
    index_shape = found[2]
    labels = [dim if dim not in dims else ("row", dim) if is_contiguous_cut(x, dim) else None for dim in range(x.ndim)]
    at = index_position(dims)
    kept = [(dim, x.shape[dim]) for dim in range(x.ndim) if dim not in dims]
    view = [*kept[:at], *[(None, size) for size in index_shape], *kept[at:]]
    aligned = align(value.shape, view) if has_value else ()
    if aligned is None:
        return None
    inputs = [tuple(labels), *([aligned] if has_value else []), *[(None,) * len(labels) for labels in found[0]]]
    decision = solve(call, Signature(inputs, [tuple(labels)], linear=[(0, 1) if has_value else (0,)], shapes=[x.shape]))
    if decision is None:
        return None
    target = decision.targets[0] or x.layout
    cut = any(target.axes_of(dim) for dim in dims)
    if cut or (not has_value and not enters_here(target)):
        rows = Rows(target, dims) if cut else None
        decision.run = _writer(
            rows, at, len(view), len(index_shape), not has_value and not enters_here(target), not call.inplace
        )
    return decision


def _writer(rows: Rows | None, at: int, ndim: int, width: int, drop_value: bool, fresh: bool):
    def run(x: Tensor, dims: tuple[int, ...], value: Any, accumulate: bool, *indices: Tensor) -> Tensor:
        if drop_value:
            value = 0
        if fresh:
            x = x.clone()
        if rows is not None:
            shifted, inside = rows.local(indices, x.device)
            indices = [index.expand(inside.shape)[inside] for index in shifted]
            if isinstance(value, Tensor):
                value = _part(value, inside, at, ndim - at - width)
        return put_dims(x, dims, value, accumulate, *indices)

    return run


def _part(value: Tensor, inside: Tensor, at: int, trailing: int) -> Tensor:
    """Returns the part of a value, broadcast over the index dims at `at`, for the indices inside."""
    ndim = at + inside.ndim + trailing
    while value.ndim > ndim:
        value = value.squeeze(0)
    value = value.reshape(*[1] * (ndim - value.ndim), *value.shape)
    value = value.expand(*value.shape[:at], *inside.shape, *value.shape[at + inside.ndim :])
    return value[(slice(None),) * at + (inside,)]
