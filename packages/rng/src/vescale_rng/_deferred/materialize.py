"""Deferred tensors get memory and values: whole, or this rank's shard only.

A shard is made by the same ATen calls on shards, where each of them allows it:

    empty, zeros, full, ...         with the shard's sizes
    fills with random numbers       the shard's part, from the generator's state of then
    elementwise functions, casts    of shards, of numbers, and of values cut to the shard
    a constant in rows or columns   `weight[padding_idx].zero_()`: where they meet the shard

Anything else (orthogonal_, a view that is drawn into) is made whole and cut: the
memory is then that of the one tensor, for a moment.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, Layout, Placement, distribute_tensor
from vescale_dtensor.engine import attach

from .._journal import fingerprint_of
from .._torch_private import OpOverload, tree_flatten, tree_map, tree_map_only
from .deferred import Deferred, attributes_of, is_deferred, value_of
from .tape import Entry, Slot, history

aten = torch.ops.aten
# Position of the sizes.
_SIZED = {
    aten.empty.memory_format: 0, aten.zeros.default: 0, aten.ones.default: 0, aten.full.default: 0,
    aten.new_empty.default: 1, aten.new_zeros.default: 1, aten.new_ones.default: 1, aten.new_full.default: 1,
}  # fmt: skip
_ALIKE = {
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default, aten.copy_.default,
    aten.zero_.default, aten.fill_.Scalar,
}  # fmt: skip
_UNWRITTEN = {
    aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.detach.default, aten.alias.default,
}  # fmt: skip
_CONSTANT = {aten.zero_.default, aten.fill_.Scalar}
Ranges = Sequence[tuple[int, int]]


def distribute(tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """`distribute_tensor` for a tensor that may be deferred; then only the shard is made. No communication."""
    if not is_deferred(tensor):
        return distribute_tensor(tensor, device_mesh, placements)
    layout = distribute_tensor(tensor._slot.meta, device_mesh, placements)._layout.base
    if layout.is_partial:
        whole = value_of(tensor._slot)
        return distribute_tensor(whole, device_mesh, placements).requires_grad_(tensor.requires_grad)
    local = materialize_shard(tensor, layout).to(layout.mesh.device_type)
    return attach(local, layout).requires_grad_(tensor.requires_grad)


def is_unwritten(tensor: Deferred) -> bool:
    """True if nothing was ever written to a deferred tensor (`torch.empty`): any values are its own."""
    return all(entry.function in _UNWRITTEN for entry in history(tensor._slot))


def materialize_shard(tensor: Deferred, layout: Layout) -> Tensor:
    """Returns this rank's part of a deferred tensor under a layout, which may be flat, as a plain tensor on the
    tensor's device.

    Only the shard is made if every call that the value depends on allows it. Otherwise, the whole tensor is made,
    sharded and freed. The layout must not be partial. No communication.
    """
    with torch.no_grad():
        local = None if layout.is_replicated else _shard(tensor._slot, layout)
        return cut(value_of(tensor._slot), layout) if local is None else local


def materialize(target: nn.Module | Tensor) -> nn.Module | Tensor:
    """Allocates the deferred parameters, buffers and other tensors of a module on this rank, in full, and fills in
    their values.

    A module is filled in place and returned; for a tensor, a new one is returned. Tied tensors stay tied, and
    parameters keep their attributes. No communication.
    """
    done: dict[int, Tensor] = {}

    def make(value: object) -> object:
        if not is_deferred(value):
            return value
        if id(value) not in done:
            done[id(value)] = _full(value)
        return done[id(value)]

    if not isinstance(target, nn.Module):
        return make(target)
    for module in target.modules():
        for owner in (module._parameters, module._buffers, module.__dict__):
            for name, value in list(owner.items()):
                if is_deferred(value):
                    owner[name] = make(value)
                elif owner is module.__dict__ and type(value) in (list, tuple, dict):
                    leaves = tree_flatten(value)[0]
                    if any(map(is_deferred, leaves)):
                        owner[name] = tree_map(make, value)
    return target


def _full(tensor: Deferred) -> Tensor:
    value = value_of(tensor._slot).requires_grad_(tensor.requires_grad)
    if getattr(tensor, "_is_param", False):
        value = nn.Parameter(value.detach(), tensor.requires_grad)
    for key, one in attributes_of(tensor).items():
        if key != "_is_param":
            setattr(value, key, one)
    return value


def recorded(tensor: Deferred) -> int:
    """A number that tells apart what deferred tensors will be: it is the same on ranks that recorded the same."""
    digest = 0
    for entry in history(tensor._slot):
        inputs = (entry.args, entry.kwargs)
        shapes = [tuple(slot.meta.shape) for slot in tree_flatten(inputs)[0] if isinstance(slot, Slot)]
        numbers = tree_map_only((Slot, torch.Generator), lambda _: None, inputs)
        drawn = (entry.taken.draw.args, fingerprint_of(entry.taken.state)) if entry.taken else None
        digest = zlib.crc32(repr((str(entry.function), shapes, numbers, drawn)).encode(), digest)
        if entry.constant is not None:
            digest = zlib.crc32(entry.constant.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), digest)
    return digest


# --- a shard ----------------------------------------------------------------------


class _NeedsFull(Exception):
    """A shard cannot be made by itself."""


def _shard(slot: Slot, layout: Layout) -> Tensor | None:
    values: dict[Slot, Tensor | list[Tensor]] = {}
    try:
        for entry in history(slot):
            out = _on_shards(entry, layout, values)
            values.update((made, out) for _, made in entry.made)
    except _NeedsFull:
        return None
    return values[slot] if isinstance(values[slot], Tensor) else None


def _on_shards(entry: Entry, layout: Layout, values: dict) -> Tensor | list[Tensor]:
    """One entry on this rank's part; a list of views is what a row or a slice has of it."""
    function, args, kwargs = entry.function, entry.args, entry.kwargs
    if entry.constant is not None:
        if entry.constant.dim() and entry.constant.shape != layout.shape:
            raise _NeedsFull
        return cut(entry.constant.clone(), layout)
    parts = [values[one] for one in tree_flatten((args, kwargs))[0] if isinstance(one, Slot)]
    if any(isinstance(part, list) for part in parts):
        if function not in _CONSTANT:
            raise _NeedsFull
        for view in parts[0]:
            function(view, *args[1:])
        return parts[0]
    for _, made in entry.made:
        if function in _VIEWS and layout.flat_axis is None:
            ranges = layout.region_at(layout.mesh.coordinate)
            return _VIEWS[function](parts[0], layout.shape, ranges, *args[1:], **kwargs)
        if made.meta.shape != layout.shape or not made.meta.is_contiguous():
            raise _NeedsFull
    if entry.taken is not None:
        return entry.taken.place(parts[0], layout)
    if function in _SIZED:
        at = _SIZED[function]
        args = (*args[:at], layout.local_shape, *args[at + 1 :])
    elif function not in _ALIKE and not _is_elementwise(function):
        raise _NeedsFull
    args, kwargs = tree_map_only(Slot, values.__getitem__, (args, kwargs))
    return function(*args, **kwargs)


def _is_elementwise(function: Callable) -> bool:
    """Tells elementwise functions by torch's own tag, which some have in place only, some only out of place."""
    if not isinstance(function, OpOverload):
        return False
    packet = getattr(aten, function._schema.name.removeprefix("aten::").rstrip("_"), None)
    one = getattr(packet, function._overloadname, function) if packet is not None else function
    return torch.Tag.pointwise in function.tags or torch.Tag.pointwise in one.tags


def cut(value: Tensor, layout: Layout) -> Tensor:
    """This rank's part of the whole `value`; a number is whole everywhere."""
    here = layout.mesh.coordinate
    if not value.dim():
        return value
    if layout.flat_axis is not None:
        local = value.new_empty(layout.local_shape)
        for box, offset in layout.boxes_at(here):
            part = value[tuple(slice(*span) for span in box)]
            local[offset : offset + part.numel()] = part.reshape(-1)
        return local
    for dim, held in enumerate(layout.region_at(here)):
        if held != ((0, layout.shape[dim]),):
            value = torch.cat([value.narrow(dim, start, stop - start) for start, stop in held or ((0, 0),)], dim)
    return value


def _selected(local: Tensor, shape: Sequence[int], ranges: Sequence[Ranges], dim: int, index: int) -> list[Tensor]:
    index %= shape[dim]
    return [part.squeeze(dim) for part in _sliced(local, shape, ranges, dim, index, index + 1)]


def _sliced(
    local: Tensor, shape: Sequence[int], ranges: Sequence[Ranges],
    dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1,
) -> list[Tensor]:  # fmt: skip
    """Returns the shard's part of the indices from `start` to `end` of a dim."""
    if step != 1:
        raise _NeedsFull
    start, end, _ = slice(start, end).indices(shape[dim])
    parts, at = [], 0
    for low, high in ranges[dim]:
        first, last = max(low, start), min(high, end)
        if first < last:
            parts.append(local.narrow(dim, at + first - low, last - first))
        at += high - low
    return parts


_VIEWS: dict[Callable, Callable] = {aten.select.int: _selected, aten.slice.Tensor: _sliced}
