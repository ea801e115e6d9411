"""Steps of a conversion on local tensors. Geometry is worked out once per pair of layouts.

A `Route` is the recipe of a conversion, a tuple of closures, one per step that does
anything. What a closure needs to know (ranges, shapes, the group) is bound when it is
made.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from .. import _effects as effects
from .._communication.collectives import (
    Recipe,
    all_gather,
    all_reduce,
    exchange,
    gather_recipe,
    reduce_scatter,
    scatter_recipe,
)
from .._layouts.layout import Layout
from .._layouts.region import Ranges, cut, flat_cut, intersect, local_offset
from .._layouts.strides import cut_to_one, dense_strides, global_stride, local_stride, memory_order, row_major
from .conversion import COLLECTIVES, Step, plan
from .cutting import assemble, grown, is_outermost, length, my_ranges, take, take_local, with_size


class Route:
    """A conversion made ready: what to run (None: nothing), and the way back for the gradient."""

    __slots__ = ("_back", "is_alias", "only_cuts", "recipe", "source", "target")

    def __init__(self, source: Layout, target: Layout) -> None:
        steps = plan(source, target)
        self.source, self.target = source, target
        recipe = [run for step in steps if (run := _COMPILE[step.kind](step)) is not None]
        self.recipe = _in_order(_joined(recipe), source, target) if recipe else None
        self.is_alias = all(step.kind == "nothing" for step in steps)
        # The result may be a part of the source's memory, where nothing is sent and something is left out.
        self.only_cuts = not self.is_alias and not any(step.kind in COLLECTIVES for step in steps)
        self._back: Route | None = None

    @property
    def back(self) -> Route:
        """The conversion of the gradient."""
        if self._back is None:
            self._back = route_of(self.target.gradient, self.source.gradient)
        return self._back

    def __call__(self, local: Tensor) -> Tensor:
        """This rank's part of the same global tensor under `target`: `local` itself when nothing moves."""
        return local if self.recipe is None else self.recipe(local)


def _joined(recipe: list[Recipe]) -> Recipe:
    if len(recipe) == 1:
        return recipe[0]

    def run(local: Tensor) -> Tensor:
        for step in recipe:
            local = step(local)
        return local

    return run


def _in_order(run: Recipe, source: Layout, target: Layout) -> Recipe:
    """`run`, whose result has its dims in memory in the order of what it was given: one device has the same tensor
    before and after, and draws by that order. What travels is row-major always: no rank relies on another's strides.
    """
    has_order = source.flat_axis is None and target.flat_axis is None and source.ndim > 1
    # Elsewhere that it is contiguous says as much, and is asked faster; what is empty is always contiguous.
    plain = row_major(source.local_shape) if has_order and (cut_to_one(source) or 0 in source.local_shape) else None
    known: dict[tuple[int, ...], tuple[list[int], tuple[int, ...]] | None] = {}

    def in_order(local: Tensor) -> Tensor:
        if local.is_neg() or local.is_conj():  # bits beside the memory, which is what travels
            local = local.resolve_conj().resolve_neg()
        out = run(local)
        if whole_on_first or not has_order or (local.is_contiguous() if plain is None else local.stride() == plain):
            return out
        strides = local.stride()
        if strides not in known:
            if len(known) > 64:
                known.clear()
            whole = global_stride(strides, local.shape, source) or strides
            order = memory_order(whole, source.shape)
            known[strides] = order and (order, local_stride(dense_strides(order, source.shape), target))
        if (found := known[strides]) is None or out.stride() == found[1]:
            return out
        order, wanted = found
        laid = out.permute(order).clone(memory_format=torch.contiguous_format)
        if effects.captured is not None:  # a graph has no storages, and its results are nobody's views
            return laid.as_strided(out.shape, wanted)
        # No view: it is as much a tensor of its own as any other result.
        return laid.new_empty(0).set_(laid.untyped_storage(), 0, out.shape, wanted)

    return in_order


@lru_cache(maxsize=65536)
def route_of(source: Layout, target: Layout) -> Route:
    """The one route between two layouts of the same mesh and shape."""
    return Route(source, target)


atexit.register(route_of.cache_clear)  # routes hold process groups, which must not outlive the interpreter

# While the reproducible mode is on, what becomes partial is whole on the axis's first rank and -0.0 on the others, so
# that no later sum over ranks has an order (`_reproducible/tree.py`).
whole_on_first = False

# --- steps without communication ------------------------------------------------


def _nothing(step: Step) -> None:
    return None


def _keep_on_first(step: Step) -> Recipe | None:
    return None if step.before.mesh.coordinate[step.axis] == 0 else _nothing_of


def _nothing_of(local: Tensor) -> Tensor:
    """Zeros, of the sign that changes no sum where that counts."""
    if whole_on_first and local.is_floating_point():
        return torch.full_like(local, -0.0)
    return torch.zeros_like(local)


def _slice(step: Step) -> Recipe:
    if step.after.flat_axis == step.axis:
        start, stop = step.after.flat_range_at(step.after.mesh.coordinate)
        return lambda local: local.reshape(-1)[start:stop]
    ranges, dim = my_ranges(step.after, step.axis)
    return lambda local: take(local, dim, ranges).contiguous()


def _pad(step: Step) -> Recipe:
    alone = _pad_alone(step)

    def pad(local: Tensor) -> Tensor:
        if not whole_on_first:
            return alone(local)
        gather, keep = _all_gather(step), _keep_on_first(step)
        whole = gather(local) if gather is not None else local
        return keep(whole) if keep is not None else whole

    return pad


def _pad_alone(step: Step) -> Recipe:
    """This rank's part between zeros."""
    if step.before.flat_axis == step.axis:
        start, stop = step.before.flat_range_at(step.before.mesh.coordinate)
        shape = step.after.local_shape

        def pad_flat(local: Tensor) -> Tensor:
            full = local.new_zeros(shape)
            full.view(-1)[start:stop] = local
            return full

        return pad_flat
    ranges, dim = my_ranges(step.before, step.axis)
    whole = step.before.size_at(step.axis, dim)

    def pad(local: Tensor) -> Tensor:
        full = local.new_zeros(with_size(local.shape, dim, whole))
        at = 0
        for start, stop in ranges:
            full.narrow(dim, start, stop - start).copy_(local.narrow(dim, at, stop - start))
            at += stop - start
        return full

    return pad


# --- steps that communicate: nothing to do on an axis of one rank ------------------


def _all_gather(step: Step) -> Recipe | None:
    layout, axis = step.before, step.axis
    if layout.flat_axis == axis:
        return _gather_flat(step)
    mesh, state = layout.mesh, layout.states[axis]
    dim, count, groups = state.dim, mesh.sizes[axis], state.groups
    if count == 1:
        return None
    cuts = cut(state, layout.size_at(axis, dim), count)
    sizes = [length(ranges) for ranges in cuts]
    shape = layout.local_shape
    if min(sizes) == max(sizes) and 0 not in shape and not state.order:
        gather, whole = gather_recipe(mesh, (axis,), shape, step.kind), with_size(shape, dim, count * shape[dim])
        if dim == 0 and groups == 1:
            return gather
        if is_outermost(shape, dim, groups):
            return lambda local: gather(local).view(*whole)
        # [n, .., g, s, ..] -> [.., g, n, s, ..] -> [.., g * n * s, ..]
        grouped = (count, *shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])
        parts, at = (grouped, dim + 1) if groups > 1 else ((count, *shape), dim)
        order = (*range(1, at + 1), 0, *range(at + 1, len(parts)))
        # Of one index each, a reshape would leave the parts where they are, and the dim the outermost in memory.
        if at == 1:  # the most common order, which has a name that costs less
            return lambda local: gather(local).view(*parts).transpose(0, 1).reshape(*whole).contiguous()
        return lambda local: gather(local).view(*parts).permute(*order).reshape(*whole).contiguous()
    longest, mine = max(sizes), sizes[mesh.coordinate[axis]]

    def gather_uneven(local: Tensor) -> Tensor:
        parts = all_gather(local if mine == longest else grown(local, dim, longest), mesh, (axis,), step.kind)
        return assemble([part.narrow(dim, 0, size) for part, size in zip(parts, sizes)], dim, cuts)

    return gather_uneven


def _gather_flat(step: Step) -> Recipe:
    layout, axis = step.before, step.axis
    mesh, shape = layout.mesh, step.after.local_shape
    sizes = [length(ranges) for ranges in flat_cut(layout.states[axis], prod(shape))]
    longest = max(sizes)
    if mesh.sizes[axis] == 1 or not longest:
        return lambda local: local.view(shape)
    gather = gather_recipe(mesh, (axis,), (longest,), step.kind)
    if min(sizes) == longest:
        return lambda local: gather(local).view(shape)

    def gather_uneven(local: Tensor) -> Tensor:
        rows = gather(local if local.numel() == longest else grown(local, 0, longest)).view(-1, longest)
        return torch.cat([row[:size] for row, size in zip(rows, sizes)]).view(shape)

    return gather_uneven


def _reduce_scatter(step: Step) -> Recipe | None:
    layout, axis = step.after, step.axis
    if layout.flat_axis == axis:
        mesh, sizes = layout.mesh, [length(r) for r in flat_cut(layout.states[axis], prod(step.before.local_shape))]
        if mesh.sizes[axis] == 1:
            return lambda local: local.reshape(-1)
        return lambda local: reduce_scatter(list(local.reshape(-1).split(sizes)), mesh, (axis,), step.kind)
    mesh, state = layout.mesh, layout.states[axis]
    dim, count, groups = state.dim, mesh.sizes[axis], state.groups
    if count == 1:
        return None
    cuts = cut(state, layout.size_at(axis, dim), count)
    sizes = [length(ranges) for ranges in cuts]
    shape = layout.local_shape
    if min(sizes) == max(sizes) and 0 not in shape and not state.order:
        scatter, sent = scatter_recipe(mesh, (axis,), shape, step.kind), (count * shape[0], *shape[1:])
        if is_outermost(shape, dim, groups):
            return lambda local: scatter(Tensor.contiguous(local).view(*sent))
        # [.., g * n * s, ..] -> [.., g, n, s, ..] -> [n, .., g, s, ..] -> [n * .., g * s, ..], which is what travels
        size = shape[dim] // groups
        pieces = (*shape[:dim], groups, count, size, *shape[dim + 1 :])
        at = dim + 1
        if groups == 1:
            pieces, at = (*shape[:dim], count, size, *shape[dim + 1 :]), dim
        if at == 1:
            return lambda local: scatter(Tensor.reshape(local, *pieces).transpose(0, 1).reshape(*sent).contiguous())
        order = (at, *range(at), *range(at + 1, len(pieces)))
        return lambda local: scatter(Tensor.reshape(local, *pieces).permute(*order).reshape(*sent).contiguous())
    return lambda local: reduce_scatter([take(local, dim, ranges) for ranges in cuts], mesh, (axis,), step.kind)


def _all_reduce(step: Step) -> Recipe | None:
    mesh, axis = step.before.mesh, step.axis
    return None if mesh.sizes[axis] == 1 else lambda local: all_reduce(local, mesh, (axis,), step.kind)


def _all_to_all(step: Step) -> Recipe | None:
    mesh, axis = step.before.mesh, step.axis
    count, me = mesh.sizes[axis], mesh.coordinate[axis]
    old, new = step.before.states[axis], step.after.states[axis]
    if count == 1:
        return None
    if old.kind == "F":
        whole = prod(step.before.opened.local_shape)
        return _recut(step, 0, flat_cut(old, whole), flat_cut(new, whole))
    old_cuts = cut(old, step.before.size_at(axis, old.dim), count)
    new_cuts = cut(new, step.after.size_at(axis, new.dim), count)
    if old.dim == new.dim:
        return _recut(step, old.dim, old_cuts, new_cuts)

    def swap(local: Tensor) -> Tensor:
        pieces = [take(local, new.dim, ranges) for ranges in new_cuts]
        shapes = [with_size(pieces[me].shape, old.dim, length(ranges)) for ranges in old_cuts]
        return assemble(exchange(pieces, shapes, mesh, axis, step.kind), old.dim, old_cuts)

    return swap


def _recut(step: Step, dim: int, old_cuts: tuple[Ranges, ...], new_cuts: tuple[Ranges, ...]) -> Recipe:
    """The same dim cut another way: every rank sends what lies in each other's new ranges."""
    mesh, axis = step.before.mesh, step.axis
    held, wanted = old_cuts[mesh.coordinate[axis]], new_cuts[mesh.coordinate[axis]]
    sent = [intersect(held, ranges) for ranges in new_cuts]
    received = [intersect(ranges, wanted) for ranges in old_cuts]

    def recut(local: Tensor) -> Tensor:
        pieces = [take_local(local, dim, held, spans) for spans in sent]
        shapes = [with_size(local.shape, dim, length(spans)) for spans in received]
        parts = exchange(pieces, shapes, mesh, axis, step.kind)
        out = local.new_empty(with_size(local.shape, dim, length(wanted)))
        for part, spans in zip(parts, received):
            at = 0
            for start, stop in spans:
                offset = local_offset(wanted, start)
                out.narrow(dim, offset, stop - start).copy_(part.narrow(dim, at, stop - start))
                at += stop - start
        return out

    return recut


def _adding_nothing(compile_step: Callable[[Step], Recipe | None]) -> Callable[[Step], Recipe | None]:
    """A sum over ranks, to which the others than the first add -0.0 in the reproducible mode: what they hold may have
    been negated."""

    def compile_signed(step: Step) -> Recipe | None:
        recipe = compile_step(step)
        if recipe is None or step.before.mesh.coordinate[step.axis] == 0:
            return recipe

        def run(local: Tensor) -> Tensor:
            if whole_on_first and local.is_floating_point():
                local = local.masked_fill(local == 0, -0.0)
            return recipe(local)

        return run

    return compile_signed


_COMPILE: dict[str, Callable[[Step], Recipe | None]] = {
    "nothing": _nothing,
    "keep_on_first": _keep_on_first,
    "slice": _slice,
    "pad": _pad,
    "all_gather": _all_gather,
    "reduce_scatter": _adding_nothing(_reduce_scatter),
    "all_reduce": _adding_nothing(_all_reduce),
    "all_to_all": _all_to_all,
}
