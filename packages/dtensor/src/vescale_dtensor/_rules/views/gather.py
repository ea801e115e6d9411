"""Functions that read or write along one dim by an index tensor: gather, scatter, index_add and their relatives.

dims where all sizes agree       keep their sharding, all tensors cut alike
dims where the index is smaller  whole
reading along a sharded dim      partial: every rank gives what it has, zeros for the rest; no communication
gather, index sharded along it   the result is sharded along it
scatter along a sharded dim      whole first
index_add, _copy, _fill          every rank writes the rows it has
adding what is sharded along     partial, and what is added to enters once
the dim (scatter_add, index_add)
partial inputs                   partial where linear: gather, scatter and index_copy of tensors, additions
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._dispatch.signature import Labels, Signature, solve
from ..elements.pointwise import broadcast
from ..registry import Call, Decision, Operand, both, decomposed, rule
from ..solvers.rows import Rows, is_contiguous_cut, nonempty


def by_operand(
    call: Call, labels: dict[Operand, Labels], output: Labels, shape, *, linear: Sequence[tuple[Operand, ...]] = (),
    summed: Sequence = (), addends: Sequence[Operand] = (),
) -> Signature | None:  # fmt: skip
    """A signature from labels per operand, in whatever order and by whatever keyword they were given."""
    if len(labels) != len(call.operands):
        return None
    return Signature(
        [labels[operand] for operand in call.operands], [output], summed=set(summed),
        linear=[tuple(operand.index for operand in together) for together in linear],
        addends=tuple(operand.index for operand in addends), shapes=[shape],
    )  # fmt: skip


def _dim_of(call: Call, x: object, at: int = 1) -> int | None:
    dim = call.get(at, "dim")
    if not isinstance(x, Operand) or not x.ndim or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        return None
    return dim % x.ndim


def _reading(
    call: Call, x: Operand, index: Operand, dim: int, signature: Signature | None, look_up, wraps: bool = False
) -> Decision | None:
    """Solves, and where `dim` of x stays sharded, masks what other ranks hold.

    `wraps`: indices count modulo the size.
    """
    decision = solve(call, signature) if signature is not None else None
    if decision is None:
        return None
    source = decision.targets[x.index] or x.layout
    if source.axes_of(dim):
        rows = Rows(source, (dim,), negative=False)

        def run(*args, **kwargs) -> Tensor:
            given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
            local, where = given[x.index], given[index.index]
            if wraps and source.shape[dim]:
                where = where.remainder(source.shape[dim])
            shifted, inside = rows.local([where], local.device)
            out = look_up(nonempty(local, (dim,)), dim, rows.within(shifted)[0])
            return out.masked_fill(~inside, 0)

        decision.run = run
    return decision


# --- reading ------------------------------------------------------------------------------


@rule(torch.gather, Tensor.gather)
def gather(call: Call):
    """x [.., v, ..], index [.., g, ..] -> [.., g, ..]: along a vocabulary that is sharded, partial."""
    x, index = call.get(0, "input"), call.get(2, "index")
    dim = _dim_of(call, x)
    if dim is None or not isinstance(index, Operand) or index.ndim != x.ndim:
        return None
    common = [d if a == b else None for d, (a, b) in enumerate(zip(x.shape, index.shape))]
    source, output = list(common), list(common)
    source[dim] = "row" if is_contiguous_cut(x, dim) else None
    output[dim] = "along"
    signature = by_operand(
        call, {x: tuple(source), index: tuple(output)}, tuple(output), index.shape, linear=[(x,)], summed=["row"]
    )
    return _reading(call, x, index, dim, signature, torch.gather)


@rule(torch.take_along_dim, Tensor.take_along_dim)
def take_along_dim(call: Call):
    """gather with broadcasting of the other dims; without a dim on the flattened tensors."""
    x, index = call.get(0, "input"), call.get(1, "indices")
    if call.get(2, "dim") is None:
        return decomposed(lambda input, indices, dim=None: input.reshape(-1).gather(0, indices.reshape(-1)))
    dim = _dim_of(call, x, 2)
    if dim is None or not isinstance(index, Operand) or index.ndim != x.ndim:
        return None
    shape = tuple(b if a == 1 else a for a, b in zip(x.shape, index.shape))
    if any(b not in (1, size) for d, (b, size) in enumerate(zip(index.shape, shape)) if d != dim):
        return None
    source = [d if a == size else None for d, (a, size) in enumerate(zip(x.shape, shape))]
    output = list(range(x.ndim))
    place = [d if b == size else None for d, (b, size) in enumerate(zip(index.shape, shape))]
    source[dim] = "row" if is_contiguous_cut(x, dim) else None
    output[dim] = place[dim] = "along"
    shape = (*shape[:dim], index.shape[dim], *shape[dim + 1 :])
    signature = by_operand(
        call, {x: tuple(source), index: tuple(place)}, tuple(output), shape, linear=[(x,)], summed=["row"]
    )
    return _reading(
        call, x, index, dim, signature, lambda x, dim, index: torch.take_along_dim(x, index, dim), wraps=True
    )


@rule(torch.take, Tensor.take)
def take(call: Call):
    """Takes by flat index: x is whole, the result is sharded as the index."""
    x, index = call.get(0, "input"), call.get(1, "index")
    if not isinstance(x, Operand) or not isinstance(index, Operand):
        return None
    labels = tuple(range(index.ndim))
    return by_operand(call, {x: (None,) * x.ndim, index: labels}, labels, index.shape, linear=[(x,)])


# --- writing --------------------------------------------------------------------------------


def _scattered(call: Call, source: object, *, linear: bool, adds: bool) -> Signature | None:
    """x, dim, index and a source tensor or a number, written along `dim`."""
    x, index = call.get(0, "input"), call.get(2, "index")
    dim = _dim_of(call, x)
    tensors = [index, source] if isinstance(source, Operand) else [index]
    if dim is None or any(not isinstance(t, Operand) or t.ndim != x.ndim for t in tensors):
        return None
    common = [d if all(t.shape[d] == size for t in tensors) else None for d, size in enumerate(x.shape)]
    common[dim] = None
    placed = list(common)
    adds = adds and isinstance(source, Operand) and index.shape[dim] == source.shape[dim]
    if adds:
        placed[dim] = "along"
    labels = {x: tuple(common), **{tensor: tuple(placed) for tensor in tensors}}
    together = [(x, source)] if linear and isinstance(source, Operand) else []
    return by_operand(
        call,
        labels,
        tuple(common),
        x.shape,
        linear=together,
        summed=["along"] if adds else (),
        addends=[x] if adds else (),
    )


@rule(both("scatter"))
def scatter(call: Call):
    """All forms; only overwriting and adding are linear."""
    reduce = call.kwargs.get("reduce")
    source = call.get(3, "src", call.kwargs.get("value"))
    return _scattered(call, source, linear=reduce in (None, "add"), adds=reduce == "add")


@rule(both("scatter_add"))
def scatter_add(call: Call):
    return _scattered(call, call.get(3, "src"), linear=True, adds=True)


@rule(both("scatter_reduce"))
def scatter_reduce(call: Call):
    """Only a sum that includes self is linear in both."""
    adds = call.get(4, "reduce") == "sum" and call.kwargs.get("include_self", True)
    return _scattered(call, call.get(3, "src"), linear=adds, adds=adds)


def _along_rows(call: Call, source: object, *, linear: bool, adds: bool = False) -> Decision | None:
    """x, dim, a 1-D index, and rows to write there: a tensor like x but along `dim`, or one number."""
    x, index = call.get(0, "input"), call.get(2, "index")
    dim = _dim_of(call, x)
    if dim is None or not isinstance(index, Operand) or index.ndim != 1:
        return None
    common: list = list(range(x.ndim))
    common[dim] = "row" if is_contiguous_cut(x, dim) else None
    labels: dict = {x: tuple(common), index: ("along",) if adds else (None,)}
    together = []
    if isinstance(source, Operand):
        if source.ndim == x.ndim:
            placed = list(common)
            placed[dim] = labels[index][0]
            labels[source] = tuple(placed)
        elif source.ndim == 0:
            labels[source] = ()
        else:
            return None
        together = [(x, source)] if linear else []
    signature = by_operand(
        call,
        labels,
        tuple(common),
        x.shape,
        linear=together,
        summed=["along"] if adds else (),
        addends=[x] if adds else (),
    )
    decision = solve(call, signature) if signature is not None else None
    if decision is None:
        return None
    target = decision.targets[x.index] or x.layout
    if target.axes_of(dim):
        rows, function = Rows(target, (dim,), negative=False), call.function

        def run(input: Tensor, dim: int, index: Tensor, *rest, **kwargs) -> Tensor:
            (shifted,), inside = rows.local([index], input.device)
            mine = inside.nonzero().squeeze(1)
            rest = [_rows(value, dim, mine) for value in rest]
            kwargs = {name: _rows(value, dim, mine) for name, value in kwargs.items()}
            return function(input, dim, shifted[mine], *rest, **kwargs)

        decision.run = run
    return decision


def _rows(value: object, dim: int, mine: Tensor) -> object:
    return value.index_select(dim, mine) if isinstance(value, Tensor) and value.ndim else value


@rule(both("index_add"))
def index_add(call: Call):
    return _along_rows(call, call.get(3, "source"), linear=True, adds=True)


@rule(both("index_copy"))
def index_copy(call: Call):
    return _along_rows(call, call.get(3, "source"), linear=True)


@rule(both("index_fill"))
def index_fill(call: Call):
    return _along_rows(call, call.get(3, "value"), linear=False)


@rule(both("index_reduce"))
def index_reduce(call: Call):
    return _along_rows(call, call.get(3, "source"), linear=False)


@rule(both("masked_scatter"))
def masked_scatter(call: Call):
    """The source is consumed in the order of the whole mask: all whole."""
    x, mask, source = call.get(0, "input"), call.get(1, "mask"), call.get(2, "source")
    if not all(isinstance(one, Operand) for one in (x, mask, source)):
        return None
    found = broadcast([x, mask])
    if found is None:
        return None
    labels = {one: (None,) * one.ndim for one in (x, mask, source)}
    return by_operand(call, labels, (None,) * len(found[2]), found[2], linear=[(x, source)])


@rule(torch.select_scatter, Tensor.select_scatter)
def select_scatter(call: Call):
    def run(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
        out = input.clone()
        out[(slice(None),) * (dim % out.ndim) + (index,)] = src
        return out

    return decomposed(run)


@rule(torch.slice_scatter, Tensor.slice_scatter)
def slice_scatter(call: Call):
    def run(input: Tensor, src: Tensor, dim: int = 0, start=None, end=None, step: int = 1) -> Tensor:
        out = input.clone()
        out[(slice(None),) * (dim % out.ndim) + (slice(start, end, step),)] = src
        return out

    return decomposed(run)
