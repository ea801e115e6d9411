"""Functions that rename, add, drop or stretch dims: permute, transpose, squeeze, unsqueeze, expand, repeat.

    sharded dims     stay sharded wherever they go
    a dim of size 1 that is dropped or stretched must be whole, should an axis cut it
    partial, I, R    unchanged (all are linear)
    in place         (`transpose_`, `squeeze_`) self gets the new layout
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index

import torch
from torch import Tensor

from ..._dispatch.signature import Signature, solve
from ..._errors import ShapeError, ViewError
from ..body import lifted
from ..registry import Call, Operand, both, decomposed, rule
from ..traits import RESHAPES, VIEWS, Trait


def dim_of(call: Call, dim: int, ndim: int | None = None) -> int:
    """`dim` counted from the left. Raises ShapeError when it is out of range."""
    ndim = call.operands[0].ndim if ndim is None else ndim
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise ShapeError(
            call.name,
            f"dim {dim} of a tensor with {ndim} dims",
            [f"input  {call.operands[0].layout!r}"],
            [(f"a dim in {-max(ndim, 1)}..{max(ndim, 1) - 1}", "")],
        )
    return dim % max(ndim, 1)


def ints(values: Sequence) -> tuple[int, ...] | None:
    """Sizes or dims as ints (numpy's too), or None when a tensor is among them."""
    if values is None or any(isinstance(value, Operand) for value in values):
        return None
    return tuple(map(index, values))


def spread(shape: tuple[int, ...]) -> tuple:
    """A local shape as arguments: torch reads several ints faster than one tuple; no ints it wants as a tuple."""
    return shape or ((),)


def renamed(call: Call, labels: Sequence, shape: Sequence[int], local: Callable | None = None):
    """Input dims are labelled 0, 1, ...; the output has `labels` and the global `shape`.

    local: the function to run instead of the called one, if its arguments do not hold for a shard.
    """
    operand = call.operands[0]
    kept = set(labels)
    inputs = tuple(dim if dim in kept else None for dim in range(operand.ndim))
    signature = Signature(
        [inputs], [tuple(labels)], linear=[(0,)], shapes=[tuple(shape)],
        local=None if local is None else lambda outs: local,
    )  # fmt: skip
    if not call.inplace:
        return signature
    decision = solve(replace(call, inplace=False), signature)
    if any(decision.targets):
        raise ViewError(
            call.name,
            f"in place it would have to move the tensor first: a dim of size 1 of {list(operand.shape)} is sharded",
            [f"input  {operand.layout!r}"],
            [(f"tensor = tensor.{call.name.rstrip('_')}(...)", "a new tensor, moved as needed")],
        )
    return decision


def permuted(call: Call, order: Sequence[int]):
    shape = call.operands[0].shape
    return renamed(call, order, [shape[dim] for dim in order])


# --- order ----------------------------------------------------------------------------


@rule(Tensor.permute, torch.permute, traits=VIEWS)
def permute(call: Call):
    dims = ints(call.rest(1, "dims"))
    return None if dims is None else permuted(call, [dim_of(call, dim) for dim in dims])


@rule(both("transpose", "swapaxes", "swapdims"), traits=VIEWS)
def transpose(call: Call):
    names = ("axis0", "axis1") if call.name.startswith("swapaxes") else ("dim0", "dim1")
    first, second = call.get(1, names[0]), call.get(2, names[1])
    if not isinstance(first, int) or not isinstance(second, int):
        return None
    order = list(range(call.operands[0].ndim))
    if order:
        first, second = dim_of(call, first), dim_of(call, second)
        order[first], order[second] = order[second], order[first]
    return permuted(call, order)


@rule(both("t"), Tensor.T.__get__, Tensor.H.__get__, traits=VIEWS)
def reverse(call: Call):
    return permuted(call, list(reversed(range(call.operands[0].ndim))))


@rule(both("adjoint"), Tensor.mT.__get__, Tensor.mH.__get__, traits=VIEWS)
def matrix_transpose(call: Call):
    order = list(range(call.operands[0].ndim))
    return permuted(call, [*order[:-2], *reversed(order[-2:])])


@rule(both("movedim", "moveaxis"), traits=VIEWS)
def movedim(call: Call):
    source, destination = call.get(1, "source"), call.get(2, "destination")
    source = (source,) if isinstance(source, int) else source
    destination = (destination,) if isinstance(destination, int) else destination
    source = [dim_of(call, dim) for dim in source]
    destination = [dim_of(call, dim) for dim in destination]
    order: list = [None] * call.operands[0].ndim
    for start, stop in zip(source, destination):
        order[stop] = start
    others = iter(dim for dim in range(len(order)) if dim not in source)
    return permuted(call, [next(others) if dim is None else dim for dim in order])


# --- dims of size 1 -------------------------------------------------------------------


@rule(both("unsqueeze"), traits=RESHAPES)
def unsqueeze(call: Call):
    shape = call.operands[0].shape
    dim = dim_of(call, call.get(1, "dim"), len(shape) + 1)
    labels = [*range(len(shape))]
    return renamed(call, [*labels[:dim], None, *labels[dim:]], [*shape[:dim], 1, *shape[dim:]])


@rule(both("squeeze"), traits=RESHAPES)
def squeeze(call: Call):
    """All dims of GLOBAL size 1, or those named; a shard's dim may be of size 1 by its cut."""
    shape = call.operands[0].shape
    dims = call.get(1, "dim", tuple(range(len(shape))))
    dims = (dims,) if isinstance(dims, int) else dims
    if not all(isinstance(dim, int) for dim in dims):
        return None
    dropped = tuple(sorted({dim_of(call, dim) for dim in dims if shape} & {d for d, n in enumerate(shape) if n == 1}))
    kept = [dim for dim in range(len(shape)) if dim not in dropped]
    squeezed = Tensor.squeeze_ if call.inplace else Tensor.squeeze
    return renamed(call, kept, [shape[dim] for dim in kept], lambda input, *args, **kwargs: squeezed(input, dropped))


def _at_least(ndim: int) -> Callable:
    """atleast_1d, _2d, _3d: dims of size 1 as torch puts them."""

    def one(tensor: Tensor) -> Tensor:
        if tensor.ndim >= ndim:
            return tensor
        if tensor.ndim == 0:
            return tensor.reshape((1,) * ndim)
        if tensor.ndim == 1 and ndim >= 2:
            tensor = tensor.unsqueeze(0)
        return tensor if tensor.ndim == ndim else tensor.unsqueeze(-1)

    def run(*tensors):
        if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
            tensors = tuple(tensors[0])
        elif len(tensors) == 1:
            return one(tensors[0])
        return tuple(one(tensor) for tensor in tensors)

    return run


AT_LEAST = {f"atleast_{ndim}d": _at_least(ndim) for ndim in (1, 2, 3)}


@rule([getattr(torch, name) for name in AT_LEAST], traits=Trait.MOVES | Trait.VIEW)
def at_least(call: Call):
    return decomposed(AT_LEAST[call.name])


# --- stretching -----------------------------------------------------------------------


@rule(Tensor.expand, Tensor.broadcast_to, torch.broadcast_to, traits=Trait.VIEW | Trait.LINEAR)
def expand(call: Call):
    """A dim of size 1 is stretched; a new dim is whole."""
    shape = call.operands[0].shape
    sizes = ints(call.rest(1, "size"))
    if sizes is None:
        return None
    new = len(sizes) - len(shape)
    before = (1,) * new + shape
    after = [old if size == -1 and at >= new else size for at, (old, size) in enumerate(zip(before, sizes))]
    if new < 0 or any(size < 0 or old not in (1, size) for old, size in zip(before, after)):
        raise ShapeError(
            call.name,
            f"sizes {list(sizes)} do not stretch the global shape {list(shape)}: only dims of size 1 can be",
            [f"input  {call.operands[0].layout!r}"],
            [("-1 keeps a dim; sizes are those of one device", "")],
        )
    labels = [
        at - new if at >= new and old == size else ("new", at) for at, (old, size) in enumerate(zip(before, after))
    ]
    kept = set(labels)
    return Signature(
        [tuple(dim if dim in kept else None for dim in range(len(shape)))], [tuple(labels)],
        linear=[(0,)], shapes=[tuple(after)],
        local=lambda outs: _expanded(spread(outs[0].local_shape)),
    )  # fmt: skip


def _expanded(sizes: tuple) -> Callable:
    return lambda input, *args, **kwargs: Tensor.expand(input, *sizes)


@rule(Tensor.expand_as, traits=Trait.VIEW | Trait.LINEAR)
def expand_as(call: Call):
    """Only the other's shape counts: it is not moved."""
    return decomposed(lambda tensor, other: tensor.expand(tuple(other.shape)))


@rule(torch.broadcast_tensors, traits=Trait.VIEW)
def broadcast_tensors(call: Call):
    def run(*tensors):
        tensors = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
        shape = torch.broadcast_shapes(*[tuple(tensor.shape) for tensor in tensors])
        given = [lifted(tensor, call.mesh) for tensor in tensors]
        return tuple(one if one.shape == shape else one.expand(shape) for one in given)  # as torch: itself, no view

    return decomposed(run)


def repeated(tensor: Tensor, repeats: Sequence[int]) -> Tensor:
    """`tensor.repeat(repeats)`, as a stretched dim before each repeated one: a plain shard of it becomes an
    interleaved one, without communication. A copy, as `repeat` is: a reshape alone may be a view."""
    sizes = (1,) * (len(repeats) - tensor.ndim) + tuple(tensor.shape)
    split, stretched = [], []
    for size, count in zip(sizes, repeats):
        split += [1, size] if count != 1 else [size]
        stretched += [count, size] if count != 1 else [size]
    out = tensor.reshape(split).expand(stretched).clone(memory_format=torch.contiguous_format)
    return out.reshape([size * count for size, count in zip(sizes, repeats)])


@rule(Tensor.repeat, traits=Trait.LINEAR)
def repeat(call: Call):
    def run(tensor, *repeats, **kwargs):
        repeats = kwargs.get("repeats", repeats)
        repeats = tuple(repeats[0]) if len(repeats) == 1 and not isinstance(repeats[0], int) else tuple(repeats)
        return repeated(tensor, repeats)

    return decomposed(run)


@rule(torch.tile, Tensor.tile, traits=Trait.LINEAR)
def tile(call: Call):
    """repeat, with ones in front where `dims` are fewer than the tensor's."""

    def run(input, *dims, **kwargs):
        dims = kwargs.get("dims", dims)
        dims = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else tuple(dims)
        return repeated(input, (1,) * (input.ndim - len(dims)) + dims)

    return decomposed(run)


@rule(torch.repeat_interleave, Tensor.repeat_interleave, traits=Trait.LINEAR)
def repeat_interleave(call: Call):
    """An int number of repeats: a stretched dim after the repeated one. (Repeats in a tensor: the fallback.)"""
    if not isinstance(call.get(1, "repeats"), int):
        return None

    def run(input, repeats, dim=None, *, output_size=None):
        tensor = input
        if dim is None:
            tensor, dim = tensor.flatten(), 0
        dim %= tensor.ndim
        shape = tuple(tensor.shape)
        stretched = (*shape[: dim + 1], repeats, *shape[dim + 1 :])
        out = tensor.unsqueeze(dim + 1).expand(stretched).clone(memory_format=torch.contiguous_format)
        return out.reshape(*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :])

    return decomposed(run)
