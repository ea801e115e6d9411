"""view, reshape, flatten, unflatten: other dims over the same elements, on global sizes.

    cut that carries over        no communication (`regroup.py` says which)
        Shard(2) of [B, T, C] as [B, T, heads, C / heads]               Shard(2), when the axis divides the heads
        Shard(1) of [B, T, C] as [B * T, C]                             InterleavedShard(0, B), and back
        InterleavedShard(2, 3) of [B, T, 3 * C] as [B, T, 3, heads, d]  Shard(3)
        an uneven Shard(0) of [B, T] as [B * T]                         RaggedShard
    cut that does not            moved to one that does: all-to-all, else all-gather; the result is a copy
    partial, I, R                unchanged
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt, prod

import torch
from torch import Tensor

from ..._dispatch.copies import mark_copy
from ..._dispatch.signature import Signature
from ..._errors import ShapeError
from ..._layouts.layout import Layout, layout_of
from ..._layouts.state import INVARIANT, State, sharded
from ..registry import Call, Decision, decomposed, rule
from ..solvers.carry import carry, sizes_before
from ..solvers.regroup import Group, carry_cut, groups_of
from ..traits import RESHAPES, VIEWS, Trait
from .shape import dim_of, ints, spread


def _viewed(shape: tuple[int, ...]) -> Callable:
    """The local `view`. A shard may be laid out so that it cannot be viewed where the whole tensor could be
    (it was cut out of another tensor, or came so from a conversion): then it is copied, and marked as a copy."""
    sizes = spread(shape)

    def run(input, *args, **kwargs):
        try:
            return Tensor.view(input, *sizes)  # not the method of DTensor, which goes by way of Python
        except RuntimeError:
            return mark_copy(input.reshape(*sizes), input)

    return run


def _reshaped(shape: tuple[int, ...]) -> Callable:
    sizes = spread(shape)
    return lambda input, *args, **kwargs: Tensor.reshape(input, *sizes)


def resolved(call: Call, sizes: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """`sizes` with the -1 filled in. Raises ShapeError when they do not hold `numel` elements."""
    known = prod(size for size in sizes if size != -1)
    unknown = sizes.count(-1)
    if unknown == 1 and known > 0 and numel % known == 0 and min(sizes) >= -1:
        return tuple(numel // known if size == -1 else size for size in sizes)
    if unknown or known != numel or min(sizes, default=0) < 0:
        layout = call.operands[0].layout
        raise ShapeError(
            call.name,
            f"sizes {list(sizes)} do not multiply to the {numel} elements of the global shape {list(layout.shape)}",
            [f"input  {layout!r}"],
            [("give global sizes: those of one device, not of the shard", "")],
        )
    return sizes


def reshape_to(call: Call, after: tuple[int, ...], local: Callable = _reshaped) -> Decision:
    """The decision to give the operand the global shape `after`."""
    before = call.operands[0].shape
    if not prod(before):
        return _empty(call, after, local)
    groups = groups_of(before, after)
    of_dim = {dim: group for group in groups for dim in group.ins}

    def local_sizes(axis: int, group: Group, layouts: tuple[Layout, Layout]):
        return [
            (tuple(a[d] for d in group.ins), tuple(b[d] for d in group.outs))
            for a, b in sizes_before(axis, layouts)
        ]

    def through(axis, state, source, results):
        group = of_dim[state.dim]
        count = source.mesh.sizes[axis]
        kept = carry_cut(state, group, local_sizes(axis, group, (source, results[0])), count)
        return None if kept is None else (kept,)

    def offers(axis, state, source, results):
        """Yields states that give a plain shard of an output dim: with it, uneven heads stay whole."""
        count = source.mesh.sizes[axis]
        for group in groups:
            for dim in group.outs:
                if after[dim] >= count:
                    sizes = local_sizes(axis, group.reverse, (results[0], source))
                    needed = carry_cut(sharded(dim), group.reverse, sizes, count)
                    if needed is not None:
                        yield needed, (sharded(dim),)

    return carry(
        call,
        [after],
        through,
        offers=offers,
        local=lambda outs: local(outs[0].local_shape),
        single=True,
        why=lambda layout, axis: _explain(layout, axis, after, of_dim[layout.states[axis].dim]),
    )


def _empty(call: Call, after: tuple[int, ...], local: Callable) -> Decision:
    """A tensor without elements: cuts of leading dims that stay as they are are kept, others have nothing to move."""
    before = call.operands[0].shape
    same = next((d for d, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
    states = [
        state if not state.is_sharded or state.dim < same else INVARIANT for state in call.operands[0].states
    ]
    out = layout_of(call.mesh, states, after)
    return Decision(out=out, run=local(out.local_shape))


def _explain(layout: Layout, axis: int, after: tuple[int, ...], group: Group) -> tuple[str, tuple]:
    """Tells `strict()` which dim, which axis, all sizes, and what would divide."""
    state: State = layout.states[axis]
    name, count = layout.mesh.names[axis], layout.mesh.sizes[axis]
    dims = ", ".join(f"dim {j} ({after[j]})" for j in group.outs)
    reason = (
        f"dim {state.dim} of {list(layout.shape)} is sharded by {state!r} on axis {name!r} ({count}), "
        f"and no shard of {dims} of {list(after)} corresponds to it"
    )
    size = prod(after[j] for j in group.outs)
    first = next((j for j in group.outs if after[j] > 1), None)
    fitting = [n for low in range(1, isqrt(size) + 1) if size % low == 0 for n in (low, size // low) if n % count == 0]
    if first is None or not fitting:
        return reason, ()
    nearest = min(fitting, key=lambda n: abs(n - after[first]))
    remedy = f"a dim {first} that {count} divides, such as {nearest} for {after[first]}"
    return reason, ((remedy, "keeps the shard, no communication"),)


# --- the functions --------------------------------------------------------------------


@rule(Tensor.view, traits=RESHAPES)
def view(call: Call):
    """view(*sizes); view(dtype) has the same bits, so that a partial sum is reduced first."""
    sizes = call.rest(1, "size")
    if "dtype" in call.kwargs or (sizes and isinstance(sizes[0], torch.dtype)):
        return decomposed(_view_dtype)
    sizes = ints(sizes)
    return None if sizes is None else reshape_to(call, resolved(call, sizes, prod(call.operands[0].shape)), _viewed)


def _view_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    from ..._dispatch.dispatch import call

    last = tensor.shape[-1] * tensor.element_size() // dtype.itemsize if tensor.ndim else 1
    return call(_bits, tensor, dtype, tensor.element_size() == dtype.itemsize, last)


def _bits(tensor: Tensor, dtype: torch.dtype, same: bool, last: int) -> Tensor:
    return tensor.view(dtype)


@rule(_bits, traits=Trait.MOVES | Trait.VIEW)
def view_dtype(call: Call):
    """Elements of another width: the last dim must be whole."""
    operand = call.operands[0]
    labels = tuple(range(operand.ndim))
    if call.args[2]:
        return Signature([labels], [labels])
    return Signature([labels], [(*labels[:-1], "last")], shapes=[(*operand.shape[:-1], call.args[3])])


@rule(Tensor.reshape, torch.reshape, traits=RESHAPES)
def reshape(call: Call):
    sizes = ints(call.rest(1, "shape"))
    return None if sizes is None else reshape_to(call, resolved(call, sizes, prod(call.operands[0].shape)))


@rule(Tensor.flatten, torch.flatten, traits=RESHAPES)
def flatten(call: Call):
    """Dims start_dim to end_dim become one; a 0-dim tensor becomes [1]."""
    shape = call.operands[0].shape
    start, end = call.get(1, "start_dim", 0), call.get(2, "end_dim", -1)
    if not isinstance(start, int) or not isinstance(end, int) or len(call.args) > 3 or "out_dim" in call.kwargs:
        return None
    if not shape:
        return reshape_to(call, (1,))
    start, end = dim_of(call, start), dim_of(call, end)
    if start > end:
        return None
    if start == end:  # the tensor itself, as in torch
        return Decision(out=call.operands[0].layout, run=lambda input, *args, **kwargs: input)
    return reshape_to(call, (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]))


@rule(Tensor.ravel, torch.ravel, traits=RESHAPES)
def ravel(call: Call):
    """Flattens as torch writes it: of what does not lie in order it is a copy, where a reshape may be a view."""
    return decomposed(lambda input: input.contiguous().view(-1))


@rule(Tensor.unflatten, torch.unflatten, traits=RESHAPES)
def unflatten(call: Call):
    """Dim `dim` becomes dims of `sizes`."""
    shape = call.operands[0].shape
    dim, sizes = call.get(1, "dim"), call.rest(2, "sizes")
    if not isinstance(dim, int) or not sizes or any(isinstance(size, (str, tuple)) for size in sizes):
        return None  # named dims
    sizes = ints(sizes)
    if sizes is None:
        return None
    dim = dim_of(call, dim)
    return reshape_to(call, (*shape[:dim], *resolved(call, sizes, shape[dim]), *shape[dim + 1 :]))


@rule(Tensor.view_as, Tensor.reshape_as, traits=RESHAPES)
def as_other(call: Call):
    """Only the other's shape counts: it is not moved."""
    if call.name == "view_as":
        return decomposed(lambda tensor, other: tensor.view(tuple(other.shape)))
    return decomposed(lambda tensor, other: tensor.reshape(tuple(other.shape)))


@rule(torch.view_as_real, traits=VIEWS)
def view_as_real(call: Call):
    operand = call.operands[0]
    labels = tuple(range(operand.ndim))
    return Signature([labels], [(*labels, None)], linear=[(0,)], shapes=[(*operand.shape, 2)])


@rule(torch.view_as_complex, traits=VIEWS)
def view_as_complex(call: Call):
    """The last dim, of size 2, must be whole."""
    operand = call.operands[0]
    labels = tuple(range(operand.ndim - 1))
    return Signature([(*labels, None)], [labels], linear=[(0,)], shapes=[operand.shape[:-1]])
