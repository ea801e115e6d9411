"""Executes conversions on local tensors: the one module of this package that communicates.

Every function takes and returns plain local tensors. A collective goes to the
process group's own methods: `torch.distributed`'s wrappers cost 4-10 us of Python
more, the functional ones 70-110. On gloo a reduction is an all-to-all and a local
sum in rank order: cheaper there than gloo's own, and the order of the sum is fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ReduceOp

from . import _events
from ._conversion import Step, plan
from ._errors import CommunicationError
from ._layout import Layout
from ._mesh import Mesh
from ._region import Ranges, cut, intersect, local_offset


def convert_local(local: Tensor, source: Layout, target: Layout) -> Tensor:
    """This rank's part of the same global tensor under `target`. Returns `local` itself when nothing moves."""
    steps = plan(source, target)
    if steps and (local.is_neg() or local.is_conj()):  # bits beside the memory, which is what travels
        local = local.resolve_conj().resolve_neg()
    for step in steps:
        local = _EXECUTE[step.kind](local, step)
    return local


# --- steps without communication ------------------------------------------------


def _nothing(local: Tensor, step: Step) -> Tensor:
    return local


def _keep_on_first(local: Tensor, step: Step) -> Tensor:
    return local if step.before.mesh.coordinate[step.axis] == 0 else torch.zeros_like(local)


def _slice(local: Tensor, step: Step) -> Tensor:
    ranges, dim = _my_ranges(step.after, step.axis)
    return _take(local, dim, ranges).contiguous()


def _pad(local: Tensor, step: Step) -> Tensor:
    ranges, dim = _my_ranges(step.before, step.axis)
    shape = list(local.shape)
    shape[dim] = step.before.size_at(step.axis, dim)
    full = local.new_zeros(shape)
    at = 0
    for start, stop in ranges:
        full.narrow(dim, start, stop - start).copy_(local.narrow(dim, at, stop - start))
        at += stop - start
    return full


# --- steps that communicate -------------------------------------------------------


class Parts(NamedTuple):
    """How one axis cuts one dim, as all_gather and reduce_scatter need it."""

    dim: int
    count: int
    cuts: tuple[Ranges, ...]
    sizes: tuple[int, ...]
    groups: int
    even: bool


@lru_cache(maxsize=65536)
def _parts(layout: Layout, axis: int) -> Parts:
    state = layout.states[axis]
    count = layout.mesh.sizes[axis]
    cuts = cut(state, layout.size_at(axis, state.dim), count)
    sizes = tuple(_length(ranges) for ranges in cuts)
    return Parts(state.dim, count, cuts, sizes, state.groups, min(sizes) == max(sizes) > 0)


def _all_gather(local: Tensor, step: Step) -> Tensor:
    layout, axis = step.before, step.axis
    dim, count, cuts, sizes, groups, even = _parts(layout, axis)
    if count == 1:
        return local
    if even:  # [n, .., g * s, ..] -> [.., g * n * s, ..]
        rows = _gather_rows(local, layout.mesh, (axis,), step.kind)
        if dim == 0 and groups == 1:
            return rows
        shape = local.shape
        whole = (*shape[:dim], count * shape[dim], *shape[dim + 1 :])
        if groups == 1:
            return rows.view(count, *shape).movedim(0, dim).reshape(whole)
        parts = rows.view(count, *shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])
        return parts.movedim(0, dim + 1).reshape(whole)
    longest = max(sizes)
    sent = local if sizes[layout.mesh.coordinate[axis]] == longest else _grown(local, dim, longest)
    parts = all_gather(sent, layout.mesh, (axis,), step.kind)
    return _assemble([part.narrow(dim, 0, size) for part, size in zip(parts, sizes)], dim, cuts)


def _reduce_scatter(local: Tensor, step: Step) -> Tensor:
    layout, axis = step.after, step.axis
    dim, count, cuts, _, groups, even = _parts(layout, axis)
    if count == 1:
        return local
    if even:  # [.., g * n * s, ..] -> [n, .., g, s, ..], which is what travels
        shape = local.shape
        size = shape[dim] // (groups * count)
        if groups == 1:
            pieces = local.reshape(*shape[:dim], count, size, *shape[dim + 1 :]).movedim(dim, 0)
        else:
            pieces = local.reshape(*shape[:dim], groups, count, size, *shape[dim + 1 :]).movedim(dim + 1, 0)
        out = reduce_scatter_even(pieces.contiguous(), layout.mesh, (axis,), step.kind)
        return out.view(*shape[:dim], groups * size, *shape[dim + 1 :])
    return reduce_scatter([_take(local, dim, ranges) for ranges in cuts], layout.mesh, (axis,), step.kind)


def _all_reduce(local: Tensor, step: Step) -> Tensor:
    if step.before.mesh.sizes[step.axis] == 1:
        return local
    return all_reduce(local, step.before.mesh, (step.axis,), step.kind)


def _all_to_all(local: Tensor, step: Step) -> Tensor:
    mesh, axis = step.before.mesh, step.axis
    count, me = mesh.sizes[axis], mesh.coordinate[axis]
    if count == 1:
        return local
    old, new = step.before.states[axis], step.after.states[axis]
    old_cuts = cut(old, step.before.size_at(axis, old.dim), count)
    new_cuts = cut(new, step.after.size_at(axis, new.dim), count)
    if old.dim != new.dim:
        pieces = [_take(local, new.dim, ranges) for ranges in new_cuts]
        shapes = [_with_size(pieces[me].shape, old.dim, _length(ranges)) for ranges in old_cuts]
        return _assemble(exchange(pieces, shapes, mesh, axis, step.kind), old.dim, old_cuts)
    dim = old.dim
    pieces, shapes, spans = [], [], []
    for rank in range(count):
        pieces.append(_take_local(local, dim, old_cuts[me], intersect(old_cuts[me], new_cuts[rank])))
        span = intersect(old_cuts[rank], new_cuts[me])
        spans.append(tuple(span))
        shapes.append(_with_size(local.shape, dim, _length(span)))
    parts = exchange(pieces, shapes, mesh, axis, step.kind)
    out = local.new_empty(_with_size(local.shape, dim, _length(new_cuts[me])))
    for part, span in zip(parts, spans):
        at = 0
        for start, stop in span:
            offset = local_offset(new_cuts[me], start)
            out.narrow(dim, offset, stop - start).copy_(part.narrow(dim, at, stop - start))
            at += stop - start
    return out


_EXECUTE: dict[str, Callable[[Tensor, Step], Tensor]] = {
    "nothing": _nothing,
    "keep_on_first": _keep_on_first,
    "slice": _slice,
    "pad": _pad,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}


# --- collectives on whole tensors: the package's own small vocabulary -------------


class _Engine(NamedTuple):
    """What a backend does for a reduction: through its own collective, or through an all-to-all."""

    reduces: bool


_ENGINES = {"gloo": _Engine(reduces=False)}
_NATIVE = _Engine(reduces=True)


def all_gather(local: Tensor, mesh: Mesh, axes: tuple[int, ...], kind: str = "all_gather") -> Tensor:
    """[n, *local.shape]: the tensors of all ranks of `axes`, which must have equal shapes, in rank order."""
    shape = local.shape
    if not local.numel():
        return local.new_empty((mesh.group(axes).size(), *shape))
    return _gather_rows(local if shape else local.view(1), mesh, axes, kind).view(-1, *shape)


def _gather_rows(local: Tensor, mesh: Mesh, axes: tuple[int, ...], kind: str) -> Tensor:
    """[n * d0, d1, ...]: the tensors of all ranks, of equal and not empty shapes, one after the other along dim 0."""
    group, count = mesh.group(axes), mesh.count(axes)
    local = local.contiguous()
    shape = local.shape
    out = local.new_empty((count * shape[0], *shape[1:]))
    _run(kind, mesh, axes, local.nbytes * (count - 1), group._allgather_base, _wire(out), _wire(local))
    return out


def all_reduce(local: Tensor, mesh: Mesh, axes: tuple[int, ...], kind: str = "all_reduce") -> Tensor:
    """The sum over all ranks of `axes`, the same bits on each; summed in rank order on gloo."""
    group = mesh.group(axes)
    count = group.size()
    if not local.numel():
        return local.clone()
    received = 2 * local.nbytes * (count - 1) // count
    if _engine(group).reduces:
        out = local.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.SUM
        _run(kind, mesh, axes, received, group.allreduce, [_summable(out)], options)
        return out
    flat = local.contiguous().view(-1)
    if flat.numel() < 4096:  # latency-bound: one collective instead of two
        gathered = flat.new_empty(count * flat.numel())
        _run(kind, mesh, axes, received, group._allgather_base, _wire(gathered), _wire(flat))
        return _ordered_sum(gathered.view(count, -1)).view(local.shape)
    chunk = -(-flat.numel() // count)
    padded = flat if chunk * count == flat.numel() else torch.cat([flat, flat.new_zeros(chunk * count - flat.numel())])
    swapped = torch.empty_like(padded)
    _run(kind, mesh, axes, received // 2, group.alltoall_base, _wire(swapped), _wire(padded), [], [])
    mine = _ordered_sum(swapped.view(count, chunk))
    whole = torch.empty_like(padded)
    _run(kind, mesh, axes, received // 2, group._allgather_base, _wire(whole), _wire(mine), count=0)
    return whole[: flat.numel()].view(local.shape)


class PendingSum:
    """An all-reduce in flight over one flat buffer; started at once, waited for in two phases.

    `advance` waits for the first half (on gloo: the all-to-all), sums locally in rank
    order and starts the second; `finish` waits for that and returns the whole sum. With
    several in flight, advance all of them before finishing the first.
    """

    def __init__(self, flat: Tensor, mesh: Mesh, axes: tuple[int, ...], kind: str = "all_reduce") -> None:
        self._mesh, self._axes, self._kind = mesh, axes, kind
        self._group = mesh.group(axes)
        self._count = count = self._group.size()
        self._size = flat.numel()
        received = 2 * flat.nbytes * (count - 1) // count
        if _engine(self._group).reduces:
            self._buffer, options = flat, AllreduceOptions()
            options.reduceOp = ReduceOp.SUM
            self._work = _start(kind, mesh, axes, received, self._group.allreduce, [_summable(flat)], options)
            return
        chunk = -(-self._size // count)
        if chunk * count != self._size:
            flat = torch.cat([flat, flat.new_zeros(chunk * count - self._size)])
        self._sent, self._buffer = flat, torch.empty_like(flat)
        self._work = _start(
            kind, mesh, axes, received, self._group.alltoall_base, _wire(self._buffer), _wire(flat), [], []
        )

    def advance(self) -> None:
        if _engine(self._group).reduces:
            return
        _wait(self._work, self._kind, self._mesh, self._axes)
        self._sent = _ordered_sum(self._buffer.view(self._count, -1))
        self._work = _start(
            self._kind, self._mesh, self._axes, 0, self._group._allgather_base, _wire(self._buffer),
            _wire(self._sent), count=0,
        )  # fmt: skip

    def finish(self) -> Tensor:
        """The sum, flat."""
        _wait(self._work, self._kind, self._mesh, self._axes)
        return self._buffer[: self._size]


def reduce_scatter(pieces: list[Tensor], mesh: Mesh, axes: tuple[int, ...], kind: str = "reduce_scatter") -> Tensor:
    """The sum over ranks of the piece meant for this one; `pieces[r]` is this rank's part for rank r."""
    group = mesh.group(axes)
    count = group.size()
    mine = pieces[group.rank()]
    sizes = [piece.numel() for piece in pieces]
    engine = _engine(group)
    received = mine.nbytes * (count - 1)
    if engine.reduces:
        longest = max(sizes)
        if longest == 0:
            return mine.clone()
        sent = torch.cat([_flat_padded(piece, longest) for piece in pieces])
        out = sent.new_empty(longest)
        _run(kind, mesh, axes, received, group._reduce_scatter_base, _summable(out), _summable(sent))
        return out[: mine.numel()].view(mine.shape)
    if not sum(sizes):
        return mine.clone()
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    out = sent.new_empty(count * mine.numel())
    sent, out_wire, width = _wire(sent), _wire(out), _width(out)
    splits = [size * width for size in sizes]
    _run(kind, mesh, axes, received, group.alltoall_base, out_wire, sent, [mine.numel() * width] * count, splits)
    return _ordered_sum(out.view(count, mine.numel())).view(mine.shape)


def reduce_scatter_even(rows: Tensor, mesh: Mesh, axes: tuple[int, ...], kind: str = "reduce_scatter") -> Tensor:
    """The sum over ranks of row r, for rank r; `rows` is contiguous, [n, ...]."""
    group = mesh.group(axes)
    count = rows.shape[0]
    received = rows.nbytes // count * (count - 1)
    if _engine(group).reduces:
        out = rows.new_empty(rows.shape[1:])
        sent = rows.flatten(0, 1) if out.ndim else rows
        _run(kind, mesh, axes, received, group._reduce_scatter_base, out if out.ndim else out.view(1), sent)
        return out
    swapped = torch.empty_like(rows)
    _run(kind, mesh, axes, received, group.alltoall_base, _wire(swapped), _wire(rows), [], [])
    return _ordered_sum(swapped)


def exchange(
    pieces: list[Tensor], shapes: list[tuple[int, ...]], mesh: Mesh, axis: int, kind: str = "all_to_all"
) -> list[Tensor]:
    """Sends `pieces[r]` to rank r of the axis; returns what each sent here, of the given shapes."""
    group = mesh.group((axis,))
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    counts = [_product(shape) for shape in shapes]
    out = sent.new_empty(sum(counts))
    width = _width(out)
    received = (out.numel() - counts[mesh.coordinate[axis]]) * out.element_size()
    splits_in = [piece.numel() * width for piece in pieces]
    splits_out = [count * width for count in counts]
    _run(kind, mesh, (axis,), received, group.alltoall_base, _wire(out), _wire(sent), splits_out, splits_in)
    return [part.view(shape) for part, shape in zip(out.split(counts), shapes)]


def gather_objects(value: object, mesh: Mesh) -> list:
    """`value` of every rank of the mesh, in the mesh's order. For checks, not for a hot path."""
    values = [value]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.group((axis,))
        parts: list = [None] * group.size()
        torch.distributed.all_gather_object(parts, values, group=group)
        values = [one for part in parts for one in part]
    return values


def _run(kind: str, mesh: Mesh, axes: tuple[int, ...], received: int, call: Callable, *args, count: int = 1) -> None:
    """Makes the collective and waits for it. `count=0`: it is the second half of the one before."""
    if _events.listeners:
        _events.announce(kind, tuple(mesh.names[axis] for axis in axes), received, count)
    try:
        call(*args).wait()
    except RuntimeError as error:
        raise _failure(error, kind, mesh, axes) from error


def _start(kind: str, mesh: Mesh, axes: tuple[int, ...], received: int, call: Callable, *args, count: int = 1):
    """Starts the collective; pairs with `_wait`."""
    if _events.listeners:
        _events.announce(kind, tuple(mesh.names[axis] for axis in axes), received, count)
    try:
        return call(*args)
    except RuntimeError as error:
        raise _failure(error, kind, mesh, axes) from error


def _wait(work, kind: str, mesh: Mesh, axes: tuple[int, ...]) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _failure(error, kind, mesh, axes) from error


def _failure(error: RuntimeError, kind: str, mesh: Mesh, axes: tuple[int, ...]) -> CommunicationError:
    names = ", ".join(repr(mesh.names[axis]) for axis in axes)
    return CommunicationError(
        kind,
        f"the collective over axis {names} of {mesh} failed, asked for by {_events.cause()}",
        [str(error).splitlines()[0]],
        [("look for the rank that failed first: the others see only a broken connection", "")],
    )


def _engine(group) -> _Engine:
    return _ENGINES.get(group.name(), _NATIVE)


# What a backend can move as it is; anything else travels as bytes. Reductions on gloo sum locally, so they never mind.
_GLOO_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8})
_NCCL_DTYPES = _GLOO_DTYPES | {torch.bfloat16, torch.bool}


def _wire(tensor: Tensor) -> Tensor:
    """The tensor as the backend can move it: flat bytes where gloo does not know the dtype."""
    if tensor.dtype in _GLOO_DTYPES or tensor.device.type != "cpu":
        return tensor
    return tensor.view(-1).view(torch.uint8)


def _width(tensor: Tensor) -> int:
    """Elements on the wire per element of the tensor."""
    return 1 if _moves(tensor) else tensor.element_size()


def _moves(tensor: Tensor) -> bool:
    return tensor.dtype in (_GLOO_DTYPES if tensor.device.type == "cpu" else _NCCL_DTYPES)


def _summable(tensor: Tensor) -> Tensor:
    """The same memory as numbers that a backend's own reduction can add: complex ones as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _ordered_sum(rows: Tensor) -> Tensor:
    """Row 0 + row 1 + ...: the same order for every element, whatever the width."""
    total = rows[0] + rows[1] if rows.shape[0] > 1 else rows[0].clone()
    for row in rows[2:]:
        total += row
    return total


# --- cutting and joining ----------------------------------------------------------


def _my_ranges(layout: Layout, axis: int) -> tuple[Ranges, int]:
    state, mesh = layout.states[axis], layout.mesh
    return cut(state, layout.size_at(axis, state.dim), mesh.sizes[axis])[mesh.coordinate[axis]], state.dim


def _length(ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _with_size(shape, dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _product(shape) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _take(tensor: Tensor, dim: int, ranges) -> Tensor:
    """The given ranges of a dim, joined; a view when there is one range."""
    if len(ranges) == 1:
        start, stop = ranges[0]
        return tensor.narrow(dim, start, stop - start)
    if not ranges:
        return tensor.narrow(dim, 0, 0)
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def _take_local(local: Tensor, dim: int, held: Ranges, wanted) -> Tensor:
    """The global ranges `wanted` out of a local tensor that holds `held`."""
    spans = []
    for start, stop in wanted:
        at = local_offset(held, start)
        spans.append((at, at + stop - start))
    return _take(local, dim, tuple(spans))


def _assemble(parts, dim: int, cuts: tuple[Ranges, ...]) -> Tensor:
    """The whole dim from every rank's part."""
    spans = []
    for rank, ranges in enumerate(cuts):
        at = 0
        for start, stop in ranges:
            if stop > start:
                spans.append((start, rank, at, stop - start))
            at += stop - start
    spans.sort()
    if not spans:
        return parts[0].contiguous()
    return torch.cat([parts[rank].narrow(dim, at, length) for _, rank, at, length in spans], dim)


def _grown(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Zero-padded at the end of `dim`: what a backend that wants equal shapes is given."""
    grown = tensor.new_zeros(_with_size(tensor.shape, dim, size))
    grown.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return grown


def _flat_padded(tensor: Tensor, size: int) -> Tensor:
    flat = tensor.reshape(-1)
    return flat if flat.numel() == size else torch.cat([flat, flat.new_zeros(size - flat.numel())])
