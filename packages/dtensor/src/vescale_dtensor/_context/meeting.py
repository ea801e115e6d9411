"""Context parallelism as a choice of an axis: when queries may stay where they are, and what then runs."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from .._communication import events
from .._layouts.layout import Layout
from .._layouts.mesh import Mesh
from .._layouts.region import cut, cut_sizes
from .._layouts.state import INVARIANT, REPLICATE, State
from .._rules.registry import Operand
from .._rules.solvers.owned import held_ranges
from . import heads, ring
from .choice import HEADS, Choice, Problem, chosen, pinned
from .described import Description
from .ring import Circle


class Meeting(NamedTuple):
    """An axis over which queries, keys and values are cut by sequence, and how they meet."""

    axis: int
    choice: Choice


def meeting_of(mesh: Mesh, query: Operand, key: Operand, value: Operand, *, swaps: bool) -> Meeting | None:
    """The axis that alone cuts the sequence of q, of k and of v; None if there is none.

    swaps: whether the kernel can attend some of the heads by itself (it draws nothing). The same on all ranks.
    """
    if not _alike(query, key, value) or 0 in (*query.shape, *key.shape, *value.shape):
        return None
    axes = [
        axis for axis, (q, k, v) in enumerate(zip(query.states, key.states, value.states))
        if _cuts(q, query) and _cuts(k, key) and v.kind == "S" and v.dim - value.ndim == -2
    ]  # fmt: skip
    if len(axes) != 1 or mesh.sizes[axes[0]] == 1:
        return None
    axis = axes[0]
    for operand in (query, key, value):
        if len(operand.layout.axes_of(operand.ndim - 2)) != 1:
            return None
    if value.states[axis].at(0) is not key.states[axis].at(0):
        return None
    choice = chosen(_problem(mesh, axis, query, key, value), pinned(mesh, axis), swaps and _divides(mesh, axis, query))
    return Meeting(axis, choice)


def gathered(meeting: Meeting, operands: list[Operand], *moved: Operand, alike: bool = False) -> list[Operand]:
    """The operands with `moved` whole on the axis: what is decided then leaves queries where they are. alike: nothing
    else is cut by it, and every rank computes the same."""
    found, state_there = list(operands), INVARIANT if alike else REPLICATE
    for operand in moved:
        states = [state_there if axis == meeting.axis else state for axis, state in enumerate(operand.states)]
        found[operand.index] = Operand(operand.layout.with_states(states), operand.plain, operand.index)
    return found


def states_for(
    meeting: Meeting, operands: list[Operand], query: Operand, mask: Operand | None
) -> tuple[tuple[State, ...], tuple[State, ...]]:
    """The states of the axis: q, k and v as they are; a mask cut like q's rows."""
    axis, rows = meeting.axis, query.shape[-2]
    states = []
    for operand in operands:
        state = operand.states[axis]
        if mask is not None and operand.index == mask.index:
            state = REPLICATE
            if meeting.choice.way != HEADS and mask.ndim > 1 and mask.shape[-2] == rows > 1:
                state = query.states[axis].at(mask.ndim - 2)
        states.append(state)
    return tuple(states), (query.states[axis],)


def meets(meeting: Meeting, query: Layout, key: Layout) -> bool:
    """True if the decision leaves q and k on their parts of the sequence, cut by the axis alone."""
    return query.axes_of(query.ndim - 2) == key.axes_of(key.ndim - 2) == (meeting.axis,)


def run_for(meeting: Meeting, query: Layout, key: Layout, select: Callable | None) -> Callable:
    """Returns the function that attends on the shards, in the place of F.scaled_dot_product_attention. `dropout_p` may
    be a tensor of noise that multiplies the weights (see vescale_rng). select: takes the keys and values of this rank's
    query heads."""
    mesh, axis = query.mesh, meeting.axis
    places = [
        cut(layout.states[axis], layout.shape[-2], mesh.sizes[axis]) for layout in (query, key)
    ]  # of both the axis is the only one that cuts the sequence
    circle = Circle(mesh, axis, *places)
    batch = held_ranges(query, 0)
    swaps = meeting.choice.way == HEADS

    def run(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        _check(is_causal, attn_mask)
        events.set_cause(F.scaled_dot_product_attention)
        if select is not None:
            key, value = select(key), select(value)
        if swaps:
            return heads.attend(circle, query, key, value, _full_kernel(attn_mask, is_causal, scale, query.shape[-3]))
        if isinstance(attn_mask, Description):
            attn_mask = attn_mask.held(batch, circle.rows[circle.rank])
        noise = dropout_p if isinstance(dropout_p, Tensor) else None
        scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
        return ring.attend(circle, query, key, value, attn_mask, noise, is_causal, scale)

    run.meets = True
    return run


def _full_kernel(mask: Tensor | None, causal: bool, scale: float | None, count: int) -> Callable:
    """torch's function on some heads of whole sequences."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, held: range) -> Tensor:
        given = mask
        if given is not None and given.ndim > 2 and given.shape[-3] == count > 1:
            given = given[..., held.start : held.stop, :, :]
        grouped = key.shape[-3] != query.shape[-3]
        return F.scaled_dot_product_attention(
            query, key, value, given, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    return kernel


def _check(causal: bool, mask: Tensor | None) -> None:
    if causal and mask is not None:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")


def _cuts(state: State, operand: Operand) -> bool:
    return state.kind == "S" and state.dim == operand.ndim - 2


def _alike(query: Operand, key: Operand, value: Operand) -> bool:
    """True if batches are equal, so that nothing is stretched, and there are heads."""
    if not query.ndim == key.ndim == value.ndim >= 3 or key.shape[-2] != value.shape[-2]:
        return False
    return query.shape[:-3] == key.shape[:-3] == value.shape[:-3] and key.shape[-3] == value.shape[-3]


def _divides(mesh: Mesh, axis: int, query: Operand) -> bool:
    """True if the axis divides the heads that every rank holds."""
    return not any(size % mesh.sizes[axis] for size in _sizes(query.layout, query.ndim - 3))


def _sizes(layout: Layout, dim: int) -> set[int]:
    """Sizes of a dim, over all ranks."""
    sizes = {layout.shape[dim]}
    for axis in layout.axes_of(dim):
        sizes = {part for size in sizes for part in cut_sizes(layout.states[axis], size, layout.mesh.sizes[axis])}
    return sizes


def _problem(mesh: Mesh, axis: int, query: Operand, key: Operand, value: Operand) -> Problem:
    """Problem of the rank that holds most; 4 bytes for a number: a layout knows no dtype."""
    batch = max(_sizes(query.layout, 0)) if query.ndim > 3 else 1
    return Problem(
        ranks=mesh.sizes[axis],
        rows=max(_sizes(query.layout, query.ndim - 2)),
        columns=max(_sizes(key.layout, key.ndim - 2)),
        heads=max(_sizes(query.layout, query.ndim - 3)),
        key_heads=max(_sizes(key.layout, key.ndim - 3)),
        query_bytes=4 * batch * (query.shape[-1] + value.shape[-1]),
        key_bytes=4 * batch * (key.shape[-1] + value.shape[-1]),
    )
