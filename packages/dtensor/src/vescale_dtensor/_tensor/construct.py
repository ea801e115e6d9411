"""Making DTensors: from a whole tensor, from shards, from a factory; and moving them.

A replicated DTensor made here is in state R: it may be a parameter, and what ranks
do with it may differ, so its gradient is partial until it is reduced.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_trace.arguments import torch_call

from .._communication.objects import gather_objects
from .._conversions.convert import convert, from_plain, on_device, own_copy, shares_storage
from .._conversions.steps import route_of
from .._errors import GradientError, PlacementError, ShapeError
from .._layouts.layout import Layout, canonical_states, layout_of
from .._layouts.mesh import Mesh, mesh_of
from .._layouts.state import INVARIANT, PARTIAL, REPLICATE
from ..placement import Partial, Placement, Placements, RaggedShard, as_tuple
from .loans import borrow
from .tensor import DTensor, attach, local_only


def distribute_tensor(tensor: Tensor, device_mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Shards a tensor that every rank holds in full. Each rank slices its shard and moves it to the mesh's device.

    A leaf stays a leaf: the result is a fresh leaf with the same `requires_grad`. A `Partial` axis keeps the value on
    its first rank and zeros elsewhere. No communication. Raises MeshError or PlacementError if the arguments do not
    fit.
    """
    _check_strided("distribute_tensor", tensor)
    layout = _layout("distribute_tensor", tensor.shape, device_mesh, placements)
    with torch.no_grad(), local_only():
        local = route_of(layout.invariant, layout)(tensor.detach())
        # The caller's memory must not be written through a slice of it, and no larger one be kept alive by it.
        moved = on_device(local, layout.mesh)
        if moved is local and (shares_storage(local, tensor) or local.untyped_storage().nbytes() > local.nbytes):
            moved = own_copy(local)
        local = moved
    return attach(local, layout).requires_grad_(tensor.requires_grad)


def from_local(
    local: Tensor,
    device_mesh: DeviceMesh,
    placements: Placements,
    *,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
) -> DTensor:
    """Returns the DTensor whose shard on this rank is `local`. It shares the storage and is differentiable.

    The gradient of `local` is, as for `to_local()`, the shard of the DTensor's gradient. On an axis where it is
    replicated, this is this rank's contribution, not summed over ranks. If all ranks hold the same leaf and you want
    its whole gradient, use `distribute_tensor` instead.

    A tensor on another device is copied to the mesh's device. With `shape=` (the global shape) nothing is exchanged,
    and `local` must have the size that the placements give it; a rank where it has not raises alone. Without it, the
    ranks exchange their local shapes, derive the global shape, and all raise alike if the shapes do not fit. `stride`
    is accepted for compatibility with torch's signature; a DTensor's strides follow those of its shard.

    `Partial("avg")` is scaled to a sum; max, min and product are reduced at once (an all-gather). Raises ShapeError if
    shapes do not fit.
    """
    del stride
    _check_strided("from_local", local)
    _check_plain("from_local", local)
    mesh, placements = mesh_of(device_mesh), as_tuple("from_local", placements)
    exchanged = [tuple(local.shape)]
    if shape is None:
        exchanged = _exchanged(local, mesh)
        shape = _agreed_shape(exchanged, mesh, placements)
    shape = tuple(shape)
    layout = layout_of(mesh, canonical_states("from_local", placements, mesh, shape), shape)
    expected = [layout.local_shape] if len(exchanged) == 1 else [layout.shape_at(c) for c in _coordinates(mesh)]
    if exchanged != expected:
        differ = [i for i, (have, want) in enumerate(zip(exchanged, expected)) if have != want]
        error = ShapeError(
            "from_local",
            "the local shapes are not those that torch.chunk gives for these placements",
            [f"global shape  {layout!r}"]
            + [f"rank {i} of the mesh  local {list(exchanged[i])}, expected {list(expected[i])}" for i in differ]
            * (len(exchanged) > 1),
            [
                ("RaggedShard((dim,), local_units)", "for contiguous parts of your own sizes"),
                ("shape=(...)", "the global shape, when it is not the sum of the shards"),
            ],
        )
        error.add_note(f"rank at {mesh.coordinate}: local {list(local.shape)}, expected {list(layout.local_shape)}")
        raise error
    result = from_plain(on_device(local, layout.mesh), layout)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            result = _reduced(result, axis, placement.reduce_op)
    return result


def redistribute(tensor: DTensor, placements: Placements) -> DTensor:
    """Returns the same global tensor with other placements. Differentiable.

    A `Replicate` axis keeps its state if it is already replicated. After a sum it is I (whose backward is free), and
    after a gather R (whose backward is a reduce-scatter).

    Cost: the cheapest conversion of design section 3 (a slice is free, an all-gather receives the rest of the tensor,
    and so on). Raises PlacementError for a placement that does not fit.
    """
    if type(placements) is not tuple:
        placements = as_tuple("redistribute", placements)
    out = convert(tensor, _redistributed(tensor._layout.base, placements), "redistribute", own=True)
    if tensor._layout.is_watched:
        borrow(out, [tensor])
    return out


@lru_cache(maxsize=4096)
def _redistributed(layout: Layout, placements: tuple[Placement, ...]) -> Layout:
    """The layout that `redistribute` aims at."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            raise PlacementError(
                "redistribute",
                f"Partial({placement.reduce_op!r}) on axis {axis} cannot be made from a value",
                [repr(layout)],
                [("Partial()", "a partial sum"), ("Replicate()", "the value itself")],
            )
    wanted = canonical_states("redistribute", placements, layout.mesh, layout.shape)
    states = [_replicated(now) if goal is REPLICATE else goal for now, goal in zip(layout.states, wanted)]
    return layout.with_states(states)


def _replicated(now):
    if now.is_replicated:
        return now
    return INVARIANT if now is PARTIAL else REPLICATE


# --- factories --------------------------------------------------------------------


@torch_call
def zeros(*size, device_mesh: DeviceMesh, placements: Placements, **options) -> DTensor:
    """`torch.zeros` of global `size`, allocating only the shard."""
    return full(*size, fill_value=0.0, device_mesh=device_mesh, placements=placements, **options)


@torch_call
def ones(*size, device_mesh: DeviceMesh, placements: Placements, **options) -> DTensor:
    """`torch.ones` of global `size`, allocating only the shard."""
    return full(*size, fill_value=1.0, device_mesh=device_mesh, placements=placements, **options)


@torch_call
def full(
    *size, fill_value=None, device_mesh: DeviceMesh, placements: Placements, requires_grad: bool = False, **options
) -> DTensor:
    """`torch.full(size, fill_value)`; on a Partial axis the first rank holds the value, and the others zero."""
    if fill_value is None:
        *size, fill_value = size
    size = _size(size)
    layout = _layout("full", size, device_mesh, placements)
    holds = all(layout.mesh.coordinate[a] == 0 for a, s in enumerate(layout.states) if s is PARTIAL)
    options.setdefault("dtype", torch.get_default_dtype() if isinstance(fill_value, float) else None)
    local = torch.full(
        layout.local_shape,
        fill_value if holds else type(fill_value)(0),
        device=options.pop("device", layout.mesh.device_type),
        **options,
    )
    return attach(local, layout).requires_grad_(requires_grad)


@torch_call
def empty(*size, device_mesh: DeviceMesh, placements: Placements, requires_grad: bool = False, **options) -> DTensor:
    """`torch.empty` of global `size`, allocating only the shard."""
    layout = _layout("empty", _size(size), device_mesh, placements)
    local = torch.empty(layout.local_shape, device=options.pop("device", layout.mesh.device_type), **options)
    return attach(local, layout).requires_grad_(requires_grad)


@torch_call
def rand(*size, device_mesh: DeviceMesh, placements: Placements, **options) -> DTensor:
    """`torch.rand` of global `size`: every rank draws the whole tensor, as one device would, and keeps its part."""
    return _sliced("rand", torch.rand, _size(size), device_mesh, placements, options)


@torch_call
def randn(*size, device_mesh: DeviceMesh, placements: Placements, **options) -> DTensor:
    """`torch.randn` of global `size`: every rank draws the whole tensor, as one device would, and keeps its part."""
    return _sliced("randn", torch.randn, _size(size), device_mesh, placements, options)


@torch_call
def arange(*bounds, device_mesh: DeviceMesh, placements: Placements, **options) -> DTensor:
    """`torch.arange(*bounds)`: made whole on every rank, then sliced."""
    options.setdefault("device", mesh_of(device_mesh).device_type)
    requires_grad = options.pop("requires_grad", False)
    return distribute_tensor(torch.arange(*bounds, **options), device_mesh, placements).requires_grad_(requires_grad)


def _sliced(name, function, size, device_mesh, placements, options) -> DTensor:
    _layout(name, size, device_mesh, placements)  # complains before anything is drawn
    options.setdefault("device", mesh_of(device_mesh).device_type)
    requires_grad = options.pop("requires_grad", False)
    return distribute_tensor(function(size, **options), device_mesh, placements).requires_grad_(requires_grad)


def _check_strided(operation: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise PlacementError(
            operation,
            f"a tensor of layout {tensor.layout} cannot be placed on a mesh: only strided tensors can be sharded",
            [f"tensor  [{', '.join(map(str, tensor.shape))}]"],
            [
                ("leave it plain, alike on every rank", "functions accept it next to DTensors"),
                ("tensor.to_dense()", "the memory of all its elements"),
            ],
        )


def _size(size) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(size)


def _layout(operation: str, shape, device_mesh, placements) -> Layout:
    placements = as_tuple(operation, placements)
    for placement in placements:
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise PlacementError(
                operation,
                f"Partial({placement.reduce_op!r}) cannot be made from a whole tensor",
                [f"placements  {placements}"],
                [("Partial()", "a partial sum: the first rank holds the value"), ("Replicate()", "the value itself")],
            )
    placements = tuple(Partial() if isinstance(p, Partial) else p for p in placements)
    mesh = mesh_of(device_mesh)
    return layout_of(mesh, canonical_states(operation, placements, mesh, shape), tuple(shape))


# --- what ranks tell each other ---------------------------------------------------


def _coordinates(mesh: Mesh):
    """The mesh coordinates of all ranks, in the mesh's order."""
    return itertools.product(*map(range, mesh.sizes))


def _check_plain(operation: str, local: Tensor) -> None:
    """A DTensor is no shard: its shape is the global one, and its memory is not."""
    if type(local) is not DTensor:
        return
    raise PlacementError(
        operation,
        "takes this rank's part as a plain tensor, but was given a DTensor, which is the global tensor",
        [f"tensor  {local._layout.base!r}"],
        [
            ("the DTensor itself", "it needs no placing"),
            ("tensor.redistribute(placements)", "under other placements"),
            ("tensor.to_local()", "for this rank's part of it"),
        ],
    )


def _exchanged(local: Tensor, mesh: Mesh) -> list[tuple[int, ...]]:
    """The local shapes of all ranks; raises alike on every rank when their dtypes differ."""
    everyone = gather_objects((tuple(local.shape), str(local.dtype)), mesh)
    if len({dtype for _, dtype in everyone}) > 1:
        raise ShapeError(
            "from_local",
            "ranks disagree on the dtype of their local tensors",
            [f"rank {i} of {mesh}  {dtype}, local {list(shape)}" for i, (shape, dtype) in enumerate(everyone)],
            [("local.to(dtype)", "the same dtype on every rank")],
        )
    return [shape for shape, _ in everyone]


def _agreed_shape(shapes: list[tuple[int, ...]], mesh: Mesh, placements) -> tuple[int, ...]:
    """The global shape from every rank's local shape; raises alike on every rank when they do not fit together."""

    def fail(rule: str):
        raise ShapeError(
            "from_local",
            rule,
            [f"rank {i} of {mesh}  local {list(shape)}" for i, shape in enumerate(shapes)],
            [("give every rank a shard of the same global tensor, or pass shape=(...)", "")],
        )

    if len({len(shape) for shape in shapes}) > 1:
        fail("ranks disagree on the number of dims of their local tensors")
    if any(isinstance(p, RaggedShard) and len(p.dims) > 1 for p in placements):
        fail("the shards of a flattened tensor do not tell its shape")
    states = canonical_states("from_local", placements, mesh, shapes[0], sizes_known=False)
    shape = list(shapes[0])
    for dim in range(len(shape)):
        axes = [axis for axis, state in enumerate(states) if state.kind == "S" and state.dim == dim]
        sizes: dict[tuple[int, ...], int] = {}
        for whole, other in zip(_coordinates(mesh), shapes):
            coordinate = tuple(whole[axis] for axis in axes)
            if sizes.setdefault(coordinate, other[dim]) != other[dim]:
                names = ", ".join(repr(mesh.names[axis]) for axis in axes)
                who = f"only {names} shards" if axes else "no axis shards"
                fail(f"ranks disagree on the size of dim {dim}, which {who}")
        shape[dim] = sum(sizes.values())
    return tuple(shape)


_REDUCE = {
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
}


def _reduced(tensor: DTensor, axis: int, operation: str) -> DTensor:
    """A Partial of another kind than sum, made a sum (avg) or reduced (max, min, product)."""
    from .._communication.collectives import all_gather

    layout = tensor._layout.base
    with local_only():
        if operation == "avg":
            local = tensor / layout.mesh.sizes[axis]
            return attach(local, layout)
        reduce = _REDUCE.get(operation)
        if reduce is None:
            raise PlacementError(
                "from_local",
                f"unknown reduce_op {operation!r} in Partial on axis {layout.mesh.names[axis]!r}",
                [f"tensor  {layout!r}"],
                [(f"use one of sum, avg, {', '.join(_REDUCE)}", "")],
            )
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise GradientError(
                "from_local",
                f"Partial({operation!r}) is reduced immediately and has no gradient, but the local tensor requires one",
                [f"tensor  {layout!r}"],
                [("from_local(local.detach(), ...)", "no gradient is wanted"), ("Partial()", "a sum has one")],
            )
        local = reduce(all_gather(tensor.detach(), layout.mesh, (axis,)))
    states = layout.states[:axis] + (INVARIANT,) + layout.states[axis + 1 :]
    return attach(local, layout.with_states(states))
