"""Collectives on local tensors: the module of this package that communicates, `pairs.py` aside.

Every function takes and returns plain local tensors. What conversions do over and
over has a recipe: everything known from shapes is worked out once, and what is left
is a small closure (`gather_recipe`, `scatter_recipe`), in which sizes go to torch as
arguments of their own (`view(*sizes)`): a tuple is first taken for a number, and the
text of the error why it is none costs 0.5 us. A collective goes to the process
group's own methods: `torch.distributed`'s wrappers cost 4-10 us of Python more, the
functional ones 70-110. On gloo a reduction is an all-to-all and a local
sum in rank order: cheaper there than gloo's own, and the order of the sum is fixed.
Two ranks on gloo have ways of their own, with the same bits (`pairs.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceOp,
    ReduceScatterOptions,
)

from .. import _effects as effects
from .._debugger import session
from .._layouts.mesh import Mesh
from . import flight_recorder, pairs
from .flight_recorder import STARTED

# --- collectives on whole tensors: the package's own small vocabulary -------------


Recipe = Callable[[Tensor], Tensor]


class _Engine(NamedTuple):
    """A backend's way of reducing: through its own collective, or through an all-to-all. `pairs`: two ranks go ways of
    their own (`pairs.py`)."""

    reduces: bool
    pairs: bool


_ENGINES = {"gloo": _Engine(reduces=False, pairs=True), "reads": _Engine(reduces=False, pairs=False)}
_NATIVE = _Engine(reduces=True, pairs=False)
_FAKE = "fake"  # torch's group without processes


def _on_the_stream(options: Any) -> Any:
    """Sets options for a collective whose result is needed at once: NCCL runs it on the stream of what comes next."""
    options.asyncOp = False
    return options


_GATHER, _SCATTER = _on_the_stream(AllgatherOptions()), _on_the_stream(ReduceScatterOptions())
_SWAP, _REDUCE = _on_the_stream(AllToAllOptions()), _on_the_stream(AllreduceOptions())
_REDUCE.reduceOp = ReduceOp.SUM


def all_gather(local: Tensor, mesh: Mesh, axes: tuple[int, ...], kind: str = "all_gather") -> Tensor:
    """[n, *local.shape]: the tensors of all ranks of `axes`, which must have equal shapes, in rank order."""
    shape = local.shape
    if not local.numel():
        return local.new_empty((mesh.count(axes), *shape))
    local = local if shape else local.view(1)
    return gather_recipe(mesh, axes, tuple(local.shape), kind)(local).view(-1, *shape)


def gather_recipe(mesh: Mesh, axes: tuple[int, ...], shape: tuple[int, ...], kind: str = "all_gather") -> Recipe:
    """Gathers local tensors of `shape`, not empty: [n * d0, d1, ...], those of all ranks one after the other."""
    count = mesh.count(axes)
    call, rank_group = pairs.directly(_gather_call(mesh, axes)), mesh.rank_group(axes)
    rows, may_be_away = (count * shape[0], *shape[1:]), mesh.device_type != "cpu"

    def gather(local: Tensor) -> Tensor:
        if effects.captured is not None:
            return effects.captured.operator(lambda one: [gather(one)], [local], [rows])[0]
        if may_be_away and is_away(local, mesh):
            local = local.to(mesh.device_type)
        local = Tensor.contiguous(local)  # of a DTensor it would be a method in Python
        out = local.new_empty(*rows)
        sent, received = (local, out) if local.dtype in _GLOO_DTYPES else (_wire(local), _wire(out))
        flight_recorder.run(kind, rank_group, local.nbytes * (count - 1), call, received, sent, _GATHER)
        return out

    return gather


def all_reduce(local: Tensor, mesh: Mesh, axes: tuple[int, ...], kind: str = "all_reduce") -> Tensor:
    """The sum over all ranks of `axes`, the same bits on each; summed in rank order on gloo."""
    if effects.captured is not None:
        return effects.captured.operator(lambda one: [all_reduce(one, mesh, axes, kind)], [local], [local.shape])[0]
    group = mesh.group(axes)
    count = group.size()
    if not local.numel():
        return local.clone()
    received = 2 * local.nbytes * (count - 1) // count
    if is_away(local, mesh):
        local = local.to(mesh.device_type)
    pair = is_pair(mesh, axes)
    if _engine(mesh, axes).reduces or (pair and local.numel() >= 4096 and pairs.sums(local)):
        out = local.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        _run(kind, mesh, axes, received, group.allreduce, [_summable(out)], _REDUCE)
        if mesh.backend(axes) == _FAKE and not out.is_meta:
            return out.mul_(count)  # it gathers as if all ranks were like this one, but leaves a sum as it was
        return out
    flat = local.contiguous().view(-1)
    if flat.numel() < 4096:  # latency-bound: one collective instead of two
        gathered = flat.new_empty(count * flat.numel())
        _run(kind, mesh, axes, received, group._allgather_base, _wire(gathered), _wire(flat), _GATHER)
        return _shaped(_ordered_sum(gathered.view(count, -1)), local.shape)
    chunk = -(-flat.numel() // count)
    padded = flat if chunk * count == flat.numel() else torch.cat([flat, flat.new_zeros(chunk * count - flat.numel())])
    swapped = torch.empty_like(padded)
    _run(kind, mesh, axes, received // 2, group.alltoall_base, _wire(swapped), _wire(padded), [], [], _SWAP)
    mine = _ordered_sum(swapped.view(count, chunk))
    whole = torch.empty_like(padded)
    _run(kind, mesh, axes, received // 2, _gather_call(mesh, axes), _wire(whole), _wire(mine), _GATHER, count=0)
    return _shaped(whole, local.shape)


def is_pair(mesh: Mesh, axes: tuple[int, ...]) -> bool:
    """True if the axes have two ranks, and their backend has ways of its own for two."""
    return _engine(mesh, axes).pairs and mesh.count(axes) == 2


def _gather_call(mesh: Mesh, axes: tuple[int, ...]) -> Callable:
    """A group's `_allgather_base`, or what does the same faster; without options it may be overtaken by the host."""
    group = mesh.group(axes)
    return pairs.gather_call(group, _SWAP) if is_pair(mesh, axes) else group._allgather_base


def is_away(local: Tensor, mesh: Mesh) -> bool:
    """True if a tensor lies on the host while the mesh does not: an offloaded parameter at rest. Collectives of it run
    on the device, and that is where their results are."""
    return local.device.type == "cpu" != mesh.device_type


def _shaped(flat: Tensor, shape: torch.Size) -> Tensor:
    """The first elements of a buffer of our own under `shape`; no view of it, so that user code may write to it."""
    return flat.new_empty(0).set_(flat.untyped_storage(), 0, shape)


def reduce_scatter(pieces: list[Tensor], mesh: Mesh, axes: tuple[int, ...], kind: str = "reduce_scatter") -> Tensor:
    """The sum over ranks of the piece meant for this one; `pieces[r]` is this rank's part for rank r."""
    group = mesh.group(axes)
    count = group.size()
    mine = pieces[group.rank()]
    if effects.captured is not None:
        call = lambda *pieces: [reduce_scatter(list(pieces), mesh, axes, kind)]
        return effects.captured.operator(call, pieces, [mine.shape])[0]
    sizes = [piece.numel() for piece in pieces]
    engine = _engine(mesh, axes)
    received = mine.nbytes * (count - 1)
    if engine.reduces:
        longest = max(sizes)
        if longest == 0:
            return mine.clone()
        sent = torch.cat([_flat_padded(piece, longest) for piece in pieces])
        out = sent.new_empty(longest)
        _run(kind, mesh, axes, received, group._reduce_scatter_base, _summable(out), _summable(sent), _SCATTER)
        return out[: mine.numel()].view(mine.shape)
    if not sum(sizes):
        return mine.clone()
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    out = sent.new_empty(count * mine.numel())
    sent, out_wire, width = _wire(sent), _wire(out), _width(out)
    splits = [size * width for size in sizes]
    own = [mine.numel() * width] * count
    _run(kind, mesh, axes, received, group.alltoall_base, out_wire, sent, own, splits, _SWAP)
    return _ordered_sum(out.view(count, mine.numel())).view(mine.shape)


def scatter_recipe(mesh: Mesh, axes: tuple[int, ...], shape: tuple[int, ...], kind: str = "reduce_scatter") -> Recipe:
    """Reduces contiguous rows [n * d0, d1, ...], each d0 meant for the next rank, to their sum over ranks, of
    `shape`."""
    group, count = mesh.group(axes), mesh.count(axes)
    rank_group, native = mesh.rank_group(axes), _engine(mesh, axes).reduces
    may_be_away = mesh.device_type != "cpu"
    call = pairs.directly(group._reduce_scatter_base if native else group.alltoall_base)
    pair, rank = is_pair(mesh, axes), group.rank()
    swap = pairs.swapper(group, _SWAP) if pair else None

    def scatter(rows: Tensor) -> Tensor:
        if effects.captured is not None:
            return effects.captured.operator(lambda one: [scatter(one)], [rows], [shape])[0]
        if may_be_away and is_away(rows, mesh):
            rows = rows.to(mesh.device_type)
        received = rows.nbytes // count * (count - 1)
        if native:
            out = rows.new_empty(*shape)
            flight_recorder.run(kind, rank_group, received, call, _summable(out), _summable(rows), _SCATTER)
            return out
        if pair:
            mine, sent = rows.view(2, -1)[rank], rows.view(2, -1)[1 - rank]
            out = rows.new_empty(*shape)
            flight_recorder.run(kind, rank_group, received, swap, _wire(out.view(-1)), _wire(sent))
            return out.add_(mine.view(shape))
        out = torch.empty_like(rows)
        flight_recorder.run(kind, rank_group, received, call, _wire(out), _wire(rows), [], [], _SWAP)
        return _ordered_sum(out.view(count, *shape))

    return scatter


def exchange(
    pieces: list[Tensor], shapes: list[tuple[int, ...]], mesh: Mesh, axis: int, kind: str = "all_to_all"
) -> list[Tensor]:
    """Sends `pieces[r]` to rank r of the axis; returns what each sent here, of the given shapes."""
    if effects.captured is not None:
        call = lambda *pieces: exchange(list(pieces), shapes, mesh, axis, kind)
        return effects.captured.operator(call, pieces, shapes)
    group = mesh.group((axis,))
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    counts = [_product(shape) for shape in shapes]
    out = sent.new_empty(sum(counts))
    width = _width(out)
    received = (out.numel() - counts[mesh.coordinate[axis]]) * out.element_size()
    splits_in = [piece.numel() * width for piece in pieces]
    splits_out = [count * width for count in counts]
    if not sent.numel() and out.numel() and mesh.backend((axis,)) == _FAKE:  # it takes nothing for an error
        sent, splits_in = out, splits_out
    _run(kind, mesh, (axis,), received, group.alltoall_base, _wire(out), _wire(sent), splits_out, splits_in, _SWAP)
    return [part.view(shape) for part, shape in zip(out.split(counts), shapes)]


def _run(kind: str, mesh: Mesh, axes: tuple[int, ...], received: int, call: Callable, *args, count: int = 1) -> None:
    """Makes the collective and waits for it. `count=0`: it is the second half of the one before."""
    flight_recorder.run(kind, mesh.rank_group(axes), received, pairs.directly(call), *args, count=count)


class Started(NamedTuple):
    """A collective that is under way, and its entry in the recorder."""

    work: Any
    noted: flight_recorder.Noted

    def wait(self) -> None:
        with self.noted.waits():
            self.work.wait()


def start(
    kind: str, mesh: Mesh, axes: tuple[int, ...], received: int, call: Callable, *args, count: int = 1
) -> Started:
    """Starts the collective."""
    noted = flight_recorder.note(kind, mesh.rank_group(axes), received, count, STARTED)
    try:
        return Started(pairs.directly(call)(*args), noted)
    except RuntimeError as error:
        raise noted.failed(error) from error


def _engine(mesh: Mesh, axes: tuple[int, ...]) -> _Engine:
    return _ENGINES.get(mesh.backend(axes), _NATIVE)


@contextlib.contextmanager
def faking(backend: str) -> Iterator[None]:
    """Within the block torch's fake group goes the way of a `backend`: the same calls, and the same buffers."""
    _ENGINES[_FAKE] = _ENGINES.get(backend, _NATIVE)
    try:
        yield
    finally:
        del _ENGINES[_FAKE]


@contextlib.contextmanager
def simulated(backend: str, simulation: session.Simulation) -> Iterator[None]:
    """Within the block `backend` is one in this process, whose ranks take turns; what it moves goes the way of gloo."""
    _ENGINES[backend], session.simulation = _ENGINES["gloo"], simulation
    try:
        yield
    finally:
        del _ENGINES[backend]
        session.simulation = None


# What a backend can move as it is; anything else travels as bytes. Reductions on gloo sum locally, so they never mind.
_GLOO_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8}
)
_NCCL_DTYPES = _GLOO_DTYPES | {torch.bfloat16, torch.bool}


def _wire(tensor: Tensor) -> Tensor:
    """The tensor as the backend can move it: flat bytes where gloo does not know the dtype."""
    if _moves(tensor):
        return tensor
    flat = tensor.view(-1)
    # One element may have any stride, and then cannot be viewed as bytes.
    return (flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat).view(torch.uint8)


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


def _product(shape) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _flat_padded(tensor: Tensor, size: int) -> Tensor:
    flat = tensor.reshape(-1)
    return flat if flat.numel() == size else torch.cat([flat, flat.new_zeros(size - flat.numel())])
