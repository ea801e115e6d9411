"""Layout: how one global tensor lies on a mesh. Immutable, interned, compared by identity.

A layout is a mesh, one state per mesh axis, and the global shape. The same dim
may be sharded by several axes: the cuts nest, the leftmost axis outermost.
Because layouts are interned, a tuple of them is a cheap dictionary key, which is
what dispatch looks decisions up with.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from weakref import WeakValueDictionary

import torch

from .._errors import InternalError, MeshError, PlacementError
from ..placement import InterleavedShard, Partial, Placement, RaggedShard, Replicate, Shard, as_tuple
from .mesh import Mesh, mesh_of
from .region import Box, Ranges, boxes, cut, cut_sizes, divides, flat_cut
from .state import INVARIANT, PARTIAL, REPLICATE, State, flat, sharded


class Layout:
    """A mesh, a state per mesh axis, and a global shape. Make one with `layout_of`.

    Every layout has an `untracked` twin, which is attached to tensors made under no_grad. If such a tensor later has a
    grad_fn, a user's autograd Function attached it, and our conversions inside that Function left no trace (design
    section 3, contract 3). Both have a `watched` twin, for tensors whose owner is told of the views that are taken of
    them (`_tensor/loans.py`). `tracked` is the ordinary one of the four. A weight with which linear layers
    multiply in lower precision (`_rules/products/scaled.py`) has four of its own, which name it as `products`. `base`
    is the ordinary one of all.
    """

    __slots__ = (
        "mesh",
        "states",
        "shape",
        "ndim",
        "base",
        "tracked",
        "products",
        "untracked",
        "watched",
        "is_untracked",
        "is_watched",
        "local_shape",
        "flat_axis",
        "is_number",
        "_gradient",
        "_invariant",
        "_lowered",
        "__weakref__",
    )

    mesh: Mesh
    base: Layout
    tracked: Layout
    products: str | None
    untracked: Layout
    watched: Layout
    states: tuple[State, ...]
    shape: torch.Size
    flat_axis: int | None  # the axis whose ranks hold parts of the flattened shard, if there is one
    is_number: bool  # one element, partial or sharded: a number that not every rank holds (`_dispatch/number.py`)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The public placement of each mesh axis."""
        return tuple(state.placement for state in self.states)

    @property
    def device_mesh(self):
        return self.mesh.device_mesh

    @property
    def gradient(self) -> Layout:
        """The layout of the gradient of a tensor with this layout."""
        if self._gradient is None:
            self._gradient = layout_of(self.mesh, tuple(s.gradient for s in self.states), self.shape)
        return self._gradient

    @property
    def invariant(self) -> Layout:
        """The same tensor, whole and alike on every rank."""
        if self._invariant is None:
            self._invariant = layout_of(self.mesh, (INVARIANT,) * self.mesh.ndim, self.shape)
        return self._invariant

    @property
    def is_replicated(self) -> bool:
        return all(state.is_replicated for state in self.states)

    @property
    def is_partial(self) -> bool:
        return any(state is PARTIAL for state in self.states)

    @property
    def reduced(self) -> Layout:
        """The same with what is partial added up: whole and alike on the ranks of those axes (I)."""
        return self.with_states([INVARIANT if state is PARTIAL else state for state in self.states])

    @property
    def is_exact(self) -> bool:
        """True if groups and units divide what they cut at every coordinate: a cut within a cut may not."""
        return all(
            divides(state, size)
            for axis, state in enumerate(self.states)
            if state.kind == "S" and (state.groups > 1 or state.units is not None)
            for size in self.sizes_at(axis, state.dim)
        )

    def sizes_at(self, axis: int, dim: int) -> set[int]:
        """The sizes of `dim` as axis `axis` finds it, over all coordinates."""
        sizes = {self.shape[dim]}
        for before in self.axes_of(dim):
            if before < axis:
                state, count = self.states[before], self.mesh.sizes[before]
                sizes = {part for size in sizes for part in cut_sizes(state, size, count)}
        return sizes

    @property
    def opened(self) -> Layout:
        """The same with the shard whole where it was flattened and cut: what the flat axis cuts."""
        if self.flat_axis is None:
            return self.base
        return self.with_states(REPLICATE if s.kind == "F" else s for s in self.states)

    def with_products(self, products: str | None) -> Layout:
        """The same of a weight with which linear layers multiply so; None for as the operands are."""
        base = self.base
        if products is not None and products not in base._lowered:
            base._lowered[products] = _twins(base.mesh, base.states, base.shape, products, base)
        return base if products is None else base._lowered[products]

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """The mesh axes that shard tensor dim `dim`, outermost first."""
        return tuple(axis for axis, state in enumerate(self.states) if state.kind == "S" and state.dim == dim)

    def with_states(self, states: Sequence[State]) -> Layout:
        return layout_of(self.mesh, tuple(states), self.shape)

    def with_shape(self, shape: Sequence[int]) -> Layout:
        return layout_of(self.mesh, self.states, tuple(shape))

    def size_at(self, axis: int, dim: int, coordinate: tuple[int, ...] | None = None) -> int:
        """Size of `dim` as axis `axis` finds it: cut by the axes before it only."""
        coordinate = self.mesh.coordinate if coordinate is None else coordinate
        size = self.shape[dim]
        for before in range(axis):
            state = self.states[before]
            if state.kind == "S" and state.dim == dim:
                size = cut_sizes(state, size, self.mesh.sizes[before])[coordinate[before]]
        return size

    def shape_at(self, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the shard at a mesh coordinate: 1-D where it is flat."""
        if self.flat_axis is not None:
            start, stop = self.flat_range_at(coordinate)
            return (stop - start,)
        shape = list(self.shape)
        for axis, state in enumerate(self.states):
            if state.kind == "S":
                shape[state.dim] = cut_sizes(state, shape[state.dim], self.mesh.sizes[axis])[coordinate[axis]]
        return tuple(shape)

    def region_at(self, coordinate: tuple[int, ...]) -> tuple[Ranges, ...]:
        """Returns, per dim, the global index ranges that the shard at `coordinate` holds, in local order.

        A flat shard is not a product of ranges: see `boxes_at`.
        """
        if self.flat_axis is not None:
            raise InternalError("a flat shard has no ranges per dim", layout=self)
        regions: list[Ranges] = [((0, size),) for size in self.shape]
        for axis, state in enumerate(self.states):
            if state.kind == "S":
                outer = regions[state.dim]
                size = sum(stop - start for start, stop in outer)
                inner = cut(state, size, self.mesh.sizes[axis])[coordinate[axis]]
                regions[state.dim] = _compose(outer, inner)
        return tuple(regions)

    def flat_range_at(self, coordinate: tuple[int, ...]) -> tuple[int, int]:
        """The half-open range of the flattened shard that the rank at `coordinate` holds."""
        whole = prod(self.opened.shape_at(coordinate))
        if self.flat_axis is None:
            return 0, whole
        (held,) = flat_cut(self.states[self.flat_axis], whole)[coordinate[self.flat_axis]]
        return held

    def boxes_at(self, coordinate: tuple[int, ...]) -> list[Box]:
        """Returns what the rank at `coordinate` holds, as boxes of the global tensor, in the order of its memory.

        Each is (a half-open index range per dim, the offset of its first element in the flattened local tensor). The
        elements of a box are contiguous there, row-major, and the boxes follow one another without gaps. A contiguous
        flat range of n dims has at most 2n - 1 boxes; an interleaved dim splits the boxes around it. A shard without
        elements has no boxes.
        """
        start, stop = self.flat_range_at(coordinate)
        return boxes(self.opened.region_at(coordinate), start, stop)

    def __repr__(self) -> str:
        states = ", ".join(map(repr, self.states))
        return f"[{', '.join(map(str, self.shape))}] {states} on {self.mesh}"

    def __reduce__(self):
        raise PlacementError(
            "pickle",
            "a layout names process groups of this process and cannot travel to another",
            [repr(self)],
            [("send tensor.full_tensor(), or tensor.to_local() with tensor.placements", "")],
        )


# Weak: sizes that never come again (a growing sequence) and meshes of a world that ended must not pile up. What
# keeps a layout are its tensors and the bounded caches of decisions and conversions.
_interned: WeakValueDictionary[tuple, Layout] = WeakValueDictionary()


def layout_of(mesh: Mesh, states: Sequence[State], shape: Sequence[int]) -> Layout:
    """The interned layout. `states` and `shape` are taken as they are: strictness is `canonical_states`' work."""
    states, shape = tuple(states), tuple(shape)
    key = (mesh, states, shape)
    layout = _interned.get(key)
    if layout is None:
        plain = tuple(_plain(mesh, axis, states, shape) for axis in range(len(states)))
        if plain != states:
            layout = layout_of(mesh, plain, shape)
        else:
            layout = _twins(mesh, states, shape)
        _interned[key] = layout
    return layout


def _twins(mesh: Mesh, states: tuple, shape: tuple, products: str | None = None, base: Layout | None = None) -> Layout:
    """Makes a layout with its twins. Returns the ordinary one of them."""
    twins = [Layout.__new__(Layout) for _ in range(4)]
    for i, one in enumerate(twins):
        one.mesh, one.states, one.shape, one.ndim = mesh, states, torch.Size(shape), len(shape)
        one.base, one.tracked, one.products, one._lowered = base or twins[0], twins[0], products, {}
        one.untracked, one.watched = twins[i | 1], twins[i | 2]
        one.is_untracked, one.is_watched = bool(i & 1), bool(i & 2)
        one._gradient = one._invariant = None
        one.flat_axis = next((axis for axis, state in enumerate(states) if state.kind == "F"), None)
        one.local_shape = one.shape_at(mesh.coordinate)
        one.is_number = prod(shape) == 1 and any(state.kind in "PS" for state in states)
    return twins[0]


def _plain(mesh: Mesh, axis: int, states: tuple[State, ...], shape: tuple[int, ...]) -> State:
    """The plainest state of an axis that says the same: one rank cuts nothing and adds nothing up, and a ragged or
    grouped cut may equal the plain one."""
    state = states[axis]
    if mesh.sizes[axis] == 1 and (state.kind == "S" or state is PARTIAL):
        return REPLICATE  # and so it is computed as on one device, to the bit
    if state.kind == "F":  # of a 1-D tensor that nobody else cuts, it is a cut of its dim
        alone = len(shape) == 1 and sum(state.units) == shape[0] > 0 and not any(s.kind == "S" for s in states)
        state = sharded(0, units=state.units) if alone else state
    if state.kind != "S" or state.units is None:  # groups are never one chunk; there may be too many to compare
        return state
    nested = any(s.kind == "S" and s.dim == state.dim for s in states[:axis])
    plain = sharded(state.dim)
    count, size = mesh.sizes[axis], shape[state.dim]
    return plain if not nested and cut(state, size, count) == cut(plain, size, count) else state


def canonical_states(
    operation: str, placements: Sequence[Placement], device_mesh, shape: Sequence[int], replicated: State = REPLICATE,
    *, sizes_known: bool = True,
) -> tuple[State, ...]:
    """User placements made strict: the one place where loose placements become states.

    `replicated` is the state that `Replicate()` means; without `sizes_known` only the
    number of dims in `shape` counts. Raises MeshError and PlacementError with the numbers.
    """
    mesh, placements = mesh_of(device_mesh), as_tuple(operation, placements)
    described = f"tensor  [{', '.join(map(str, shape))}] on {mesh}"
    if len(placements) != mesh.ndim:
        raise MeshError(
            operation,
            f"{len(placements)} placements for a mesh of {mesh.ndim} axes: one per axis is needed",
            [described, f"placements  {placements}"],
            [("give one placement per axis, Replicate() where the axis does not matter", "")],
        )
    states = []
    for axis, placement in enumerate(placements):
        if _flattens(placement, len(shape)) and (len(shape) != 1 or _cut_elsewhere(placements, axis)):
            states.append(REPLICATE)  # it is applied last, below
            continue
        name, count = mesh.names[axis], mesh.sizes[axis]
        if isinstance(placement, Replicate):
            states.append(replicated)
            continue
        if isinstance(placement, Partial):
            states.append(PARTIAL)
            continue
        if isinstance(placement, RaggedShard):
            if len(placement.dims) != 1:
                raise PlacementError(
                    operation,
                    f"RaggedShard over dims {placement.dims} on axis {name!r} of a tensor with {len(shape)} dims: it "
                    "takes one dim, or all of them",
                    [described],
                    [
                        (f"RaggedShard({tuple(range(len(shape)))}, local_units)", "units are elements of the shard"),
                        ("RaggedShard((dim,), local_units)", "units are proportions of the dim"),
                    ],
                )
            dim, groups, units, order = placement.dims[0], 1, placement.local_units, None
            if len(units) != count or min(units) < 0:
                raise PlacementError(
                    operation,
                    f"RaggedShard has {len(units)} units {units} for the {count} ranks of axis {name!r}",
                    [described],
                    [(f"give {count} units, none negative", "")],
                )
        elif isinstance(placement, InterleavedShard):
            dim, groups, units, order = placement.dim, placement.groups, None, placement.order
        elif isinstance(placement, Shard):
            dim, groups, units, order = placement.dim, 1, None, None
        else:
            raise PlacementError(
                operation,
                f"{placement!r} on axis {name!r} is not a placement",
                [described],
                [("use Shard, Replicate, Partial, InterleavedShard or RaggedShard", "")],
            )
        if not -len(shape) <= dim < len(shape):
            raise PlacementError(
                operation,
                f"{placement!r} on axis {name!r} names dim {dim} of a tensor with {len(shape)} dims",
                [described],
                [(f"use a dim in 0..{len(shape) - 1}", "") if shape else ("use Replicate()", "")],
            )
        if order is not None and set(order) != set(range(count)):
            raise PlacementError(
                operation,
                f"the order {order} of chunks does not name each of the {count} ranks of axis {name!r}, and no other",
                [described],
                [(f"InterleavedShard({dim}, {groups}, zigzag({count}))", "a front and a back part for each rank")],
            )
        state = sharded(dim % len(shape), groups, units, order)
        states.append(state)
        if not sizes_known:
            continue
        probe = layout_of(mesh, (*states, *[REPLICATE] * (mesh.ndim - axis - 1)), shape)
        size = next((size for size in sorted(probe.sizes_at(axis, state.dim)) if not divides(state, size)), None)
        if size is not None:
            whole = f"{groups} groups" if units is None else f"units {units}"
            raise PlacementError(
                operation,
                f"dim {state.dim} of size {size} does not divide into {whole} on axis {name!r} ({count})",
                [described],
                [(f"use Shard({state.dim})", "uneven sizes are allowed there")],
            )
    return _flattened(operation, mesh, placements, tuple(states), shape, described, sizes_known)


def _flattens(placement: Placement, ndim: int) -> bool:
    return isinstance(placement, RaggedShard) and placement.dims == tuple(range(ndim))


def _cut_elsewhere(placements: tuple[Placement, ...], axis: int) -> bool:
    """True if another axis cuts the one dim of a 1-D tensor, and not in proportions, which nest."""
    others = [p for at, p in enumerate(placements) if at != axis]
    return any(isinstance(p, (Shard, InterleavedShard)) for p in others)


def _flattened(operation, mesh: Mesh, placements, states, shape, described: str, sizes_known: bool):
    """`states` with the flat cut in its place, which comes last. Raises PlacementError with the numbers."""
    axes = [a for a, p in enumerate(placements) if _flattens(p, len(shape)) and states[a].kind != "S"]
    if not axes:
        return states
    if len(axes) > 1:
        names = ", ".join(repr(mesh.names[axis]) for axis in axes)
        raise PlacementError(
            operation,
            f"RaggedShard over all dims on axes {names}: one axis at most can cut the flattened shard",
            [described],
            [("Replicate() on the others", ""), ("Shard(dim) on the others", "they cut before it")],
        )
    axis, units = axes[0], placements[axes[0]].local_units
    name, count = mesh.names[axis], mesh.sizes[axis]
    if len(units) != count or min(units) < 0:
        raise PlacementError(
            operation,
            f"RaggedShard has {len(units)} units {units} for the {count} ranks of axis {name!r}",
            [described],
            [(f"give {count} units, none negative", "")],
        )
    if sizes_known:
        opened = layout_of(mesh, states, shape)
        largest = max(prod(opened.shape_at(c)) for c in itertools.product(*map(range, mesh.sizes)))
        if sum(units) != largest:
            each = -(-largest // count)
            even = tuple(min((r + 1) * each, largest) - min(r * each, largest) for r in range(count))
            raise PlacementError(
                operation,
                f"the units {units} of RaggedShard over all dims on axis {name!r} sum to {sum(units)}, and the "
                f"shard that they cut has {largest} elements",
                [described],
                [(f"RaggedShard({placements[axis].dims}, {even})", "even parts")],
            )
    return (*states[:axis], flat(len(shape), units), *states[axis + 1 :])


def _compose(outer: Ranges, inner: Ranges) -> Ranges:
    """Ranges `inner`, which index into the concatenation of `outer`, as global ranges."""
    found = []
    for low, high in inner:
        at = 0
        for start, stop in outer:
            first, last = max(low, at), min(high, at + stop - start)
            if first < last:
                found.append((start + first - at, start + last - at))
            at += stop - start
    return tuple(found)
