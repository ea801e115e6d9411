"""Functions that join or part tensors along a dim: cat, stack, split, chunk, unbind, diagonal, unfold.

    other dims sharded            stay sharded
    cat of plain shards of one block length along their dim    InterleavedShard, no communication
    cat of shards of other lengths                             the same, with an order of chunks
    cat with legacy tensors of shape [0] alone                 stays sharded, on its dim, too
    split of an InterleavedShard into whole groups, or chunks  shards of fewer, no communication
    else the dim must be whole    moved to another dim: all-to-all, else all-gather
    partial, I, R                 unchanged; cat of a partial with others is partial
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import gcd

import torch
from torch import Tensor

from ..._dispatch.signature import Signature
from ..._errors import ShapeError
from ..._layouts.layout import Layout
from ..._layouts.state import sharded
from ..registry import Call, Operand, both, decomposed, rule
from ..solvers.carry import carry, sizes_before
from ..traits import VIEWS, Trait
from .part import part_of
from .shape import AT_LEAST, dim_of, renamed

# --- joining --------------------------------------------------------------------------


@rule(torch.cat, torch.concat, torch.concatenate, traits=Trait.MOVES)
def cat(call: Call):
    """Sizes along `dim` may differ; legacy tensors of shape [0] are skipped."""
    dim = call.get(1, "dim", call.kwargs.get("axis", 0))
    joined = [operand for operand in call.operands if operand.shape != (0,)] or call.operands
    ndim = joined[0].ndim
    if not isinstance(dim, int) or any(operand.ndim != ndim for operand in joined):
        return None
    dim = dim_of(call, dim, ndim)
    rest = joined[0].shape[:dim] + joined[0].shape[dim + 1 :]
    if any(operand.shape[:dim] + operand.shape[dim + 1 :] != rest for operand in joined):
        raise ShapeError(
            call.name,
            f"global shapes differ in a dim other than {dim}",
            [f"operand {operand.index}  {operand.layout!r}" for operand in call.operands],
            [],
        )
    labels = tuple(None if d == dim else d for d in range(ndim))
    shape = list(joined[0].shape)
    shape[dim] = sum(operand.shape[dim] for operand in joined)
    alone = len(joined) == 1  # beside an empty cache: its dim may stay cut
    own = tuple(range(ndim))
    return Signature(
        [(own if alone else labels) if operand in joined else (None,) for operand in call.operands],
        [own if alone else tuple("joined" if d == dim else d for d in range(ndim))],
        linear=[tuple(range(len(call.operands)))],
        shapes=[tuple(shape)],
        extra=_blocks(call, dim) if len(joined) == len(call.operands) else None,
    )


def _blocks(call: Call, dim: int) -> Callable | None:
    """cat along a dim that one axis cuts into blocks of one length: the result has the blocks of all."""
    cutting = {axis for operand in call.operands for axis in operand.layout.axes_of(dim)}
    if len(cutting) != 1:
        return None
    (only,) = cutting

    def extra(axis: int):
        if axis != only:
            return
        cut = [operand for operand in call.operands if axis in operand.layout.axes_of(dim)]
        length = cut[0].shape[dim] // cut[0].states[axis].groups
        if length == 0 or any(s.units is not None or s.order for s in (operand.states[axis] for operand in cut)):
            return
        if not any(operand.shape[dim] % length or not operand.shape[dim] for operand in call.operands):
            groups = [operand.shape[dim] // length for operand in call.operands]
            yield tuple(sharded(dim, count) for count in groups), (sharded(dim, sum(groups)),)
        yield from _dealt_out(call, axis, dim)

    return extra


MOST_CHUNKS = 64
"""Most chunks of a dim that is dealt out in an order that `cat` makes."""


def _dealt_out(call: Call, axis: int, dim: int):
    """cat of pieces of several lengths: as chunks of what divides all, each where it lies."""
    count = call.mesh.sizes[axis]
    states = [
        operand.states[axis] if axis in operand.layout.axes_of(dim) else sharded(dim) for operand in call.operands
    ]
    lengths = []
    for operand, state in zip(call.operands, states):
        length, rest = divmod(operand.shape[dim], state.groups * count)
        if state.units is not None or state.order or rest or not length:
            return
        lengths.append(length)
    unit = gcd(*lengths)
    order = [
        rank
        for length, state in zip(lengths, states)
        for rank in (*range(count),) * state.groups
        for _ in range(length // unit)
    ]
    if len(set(lengths)) > 1 and len(order) <= MOST_CHUNKS:
        yield tuple(states), (sharded(dim, order=tuple(order)),)


@rule(torch.stack, traits=Trait.MOVES)
def stack(call: Call):
    """A new dim, whole."""
    first = call.operands[0]
    if any(operand.shape != first.shape for operand in call.operands):
        raise ShapeError(
            call.name,
            "global shapes differ",
            [f"operand {operand.index}  {operand.layout!r}" for operand in call.operands],
            [],
        )
    dim = dim_of(call, call.get(1, "dim", 0), first.ndim + 1)
    labels = tuple(range(first.ndim))
    return Signature(
        [labels] * len(call.operands),
        [(*labels[:dim], "stacked", *labels[dim:])],
        linear=[tuple(range(len(call.operands)))],
        shapes=[(*first.shape[:dim], len(call.operands), *first.shape[dim:])],
    )


def _hstack(tensors) -> Tensor:
    tensors = [AT_LEAST["atleast_1d"](tensor) for tensor in tensors]
    return torch.cat(tensors, 0 if tensors[0].ndim == 1 else 1)


def _vstack(tensors) -> Tensor:
    return torch.cat([AT_LEAST["atleast_2d"](tensor) for tensor in tensors], 0)


def _dstack(tensors) -> Tensor:
    return torch.cat([AT_LEAST["atleast_3d"](tensor) for tensor in tensors], 2)


def _column_stack(tensors) -> Tensor:
    return torch.cat([tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor for tensor in tensors], 1)


_STACKS = {
    torch.hstack: _hstack,
    torch.vstack: _vstack,
    torch.row_stack: _vstack,
    torch.dstack: _dstack,
    torch.column_stack: _column_stack,
}


@rule(list(_STACKS), traits=Trait.MOVES)
def stacks(call: Call):
    """Joins as `cat` of what `atleast_*d` gives."""
    return decomposed(_STACKS[call.function]) if "out" not in call.kwargs else None


# --- parting --------------------------------------------------------------------------


def global_shapes(call: Call) -> list[tuple[int, ...]]:
    """The global shapes of the outputs, asked of torch itself; it complains about wrong arguments, too."""
    whole = torch.empty(call.operands[0].shape, device="meta")
    kwargs = {name: value for name, value in call.kwargs.items() if not isinstance(value, Operand)}
    outs = call.function(whole, *call.args[1:], **kwargs)
    return [tuple(out.shape) for out in ((outs,) if isinstance(outs, Tensor) else outs)]


@rule(both("tensor_split"), traits=VIEWS)
def tensor_split(call: Call):
    """Boundaries or a number of parts; in a tensor, its values are read first."""
    if len(call.operands) == 1:
        return _parted(call, call.get(2, "dim", 0))

    def run(input: Tensor, tensor_indices_or_sections: Tensor, dim: int = 0):
        bounds = tensor_indices_or_sections.tolist()
        return input.tensor_split(tuple(bounds) if isinstance(bounds, list) else bounds, dim)

    return decomposed(run)


@rule(
    both("split", "chunk", "split_with_sizes", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"), traits=VIEWS
)
def split(call: Call):
    return _parted(call, call.get(2, "dim", 0))


@rule(both("hsplit"), traits=VIEWS)
def hsplit(call: Call):
    return _parted(call, 0 if call.operands[0].ndim == 1 else 1)


@rule(both("vsplit"), traits=VIEWS)
def vsplit(call: Call):
    return _parted(call, 0)


@rule(both("dsplit"), traits=VIEWS)
def dsplit(call: Call):
    return _parted(call, 2)


def _parted(call: Call, dim):
    """Pieces of whole groups keep the cut; any other cut of `dim` must go."""
    if len(call.operands) != 1 or not isinstance(dim, int):
        return None
    shapes = global_shapes(call)
    dim = dim_of(call, dim)

    def through(axis, state, source, results):
        if state.dim != dim:
            return (state,) * len(shapes)
        count = call.mesh.sizes[axis]
        found = set()
        for size, *lengths in sizes_before(axis, (source, *results)):
            starts = accumulate((one[dim] for one in lengths), initial=0)
            found.add(tuple(part_of(state, count, size[dim], at, one[dim]) for at, one in zip(starts, lengths)))
        kept = found.pop()
        return None if found or None in kept else kept

    def local(outs):
        sizes = [layout.local_shape[dim] for layout in outs]
        if sizes == [shape[dim] for shape in shapes]:
            return None
        return _splitter(sizes, dim)

    decision = carry(call, shapes, through, local=local, why=lambda layout, axis: _explain(layout, axis, shapes))
    if decision is not None:
        sizes = (*call.args[1:2], *call.kwargs.values())  # where each is told, the parts are of several kinds
        decision.parts = any(isinstance(one, (tuple, list)) for one in sizes) and dim == len(shapes[0]) - 1
    return decision


def _splitter(sizes: list[int], dim: int) -> Callable:
    def run(*args, **kwargs):
        tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return torch.split(tensor, sizes, dim)

    return run


def _explain(layout: Layout, axis: int, shapes: list[tuple[int, ...]]) -> tuple[str, tuple]:
    """Tells `strict()` which cut the pieces do not respect, and the one they would."""
    state = layout.states[axis]
    name, count = layout.mesh.names[axis], layout.mesh.sizes[axis]
    sizes = [shape[state.dim] for shape in shapes]
    reason = (
        f"dim {state.dim} of {list(layout.shape)} is sharded by {state!r} on axis {name!r} ({count}), "
        f"and pieces of {sizes} are not whole groups of it"
    )
    groups = layout.shape[state.dim] // (gcd(*sizes) or 1)
    return reason, ((f"InterleavedShard({state.dim}, {groups})", "shards every piece alike, no communication"),)


@rule(both("unbind"), traits=VIEWS)
def unbind(call: Call):
    shape = call.operands[0].shape
    dim = call.get(1, "dim", 0)
    if not isinstance(dim, int) or not shape:
        return None
    dim = dim_of(call, dim)
    kept = tuple(d for d in range(len(shape)) if d != dim)
    inputs = tuple(d if d != dim else None for d in range(len(shape)))
    rest = tuple(shape[d] for d in kept)
    return Signature(
        [inputs], [kept] * shape[dim], linear=[(0,)], shapes=[rest] * shape[dim], single=False
    )


@rule(both("diagonal"), torch.linalg.diagonal, traits=VIEWS)
def diagonal(call: Call):
    """The two dims must be whole; the diagonal comes last."""
    ndim = call.operands[0].ndim
    default = (-2, -1) if call.function is torch.linalg.diagonal else (0, 1)
    dims = {dim_of(call, call.get(at, f"dim{at - 1}", default[at - 2])) for at in (2, 3)}
    (shape,) = global_shapes(call)
    return renamed(call, [*[d for d in range(ndim) if d not in dims], "diagonal"], shape)


@rule(both("diag_embed"), traits=Trait.MOVES | Trait.LINEAR)
def diag_embed(call: Call):
    """The last dim must be whole; the two that it becomes go where the call says."""
    ndim = call.operands[0].ndim
    dims = [dim_of(call, call.get(at, f"dim{at - 1}", default), ndim + 1) for at, default in ((2, -2), (3, -1))]
    others = iter(range(ndim - 1))
    labels = [f"diagonal {d}" if d in dims else next(others) for d in range(ndim + 1)]
    (shape,) = global_shapes(call)
    return renamed(call, labels, shape)


@rule(Tensor.unfold, traits=Trait.VIEW | Trait.LINEAR)
def unfold(call: Call):
    """Windows along a dim, which must be whole; they come last."""
    dim = dim_of(call, call.get(1, "dimension"))
    labels = ["windows" if d == dim else d for d in range(call.operands[0].ndim)]
    (shape,) = global_shapes(call)
    return renamed(call, [*labels, "window"], shape)
