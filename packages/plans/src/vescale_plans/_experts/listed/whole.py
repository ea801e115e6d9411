"""A block that writes state of its own, such as a router's correction or a count of choices, sees the whole batch.

It runs once, as any module does: on DTensors, which is what one device computes, so that all ranks write the same.
Its experts stay where they are. Whenever the block calls one, the ranks that hold it compute its rows, for the others
zeros stand in, and the sum of both is what all of them get:

    rows of expert 2, on every rank     rank 0, experts 0 1: zeros     rank 1, experts 2 3: expert 2 of the rows     sum

Cost: per call of an expert its rows are made whole over the expert axis, and what it gives is summed over it. The two
all-to-alls of `call.py` cost less, but only a forward without memory can run twice, on parts of the batch.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import INVARIANT, PARTIAL, REPLICATE, State, convert, from_plain, layout_of

from ..local_rows import row_states
from .members import Members
from .stand_ins import Stubs


class WholeCall:
    """One call of such a block, until `close`."""

    def __init__(self, members: Members, block: nn.Module) -> None:
        self._members, self._block, self._held = members, block, block._modules[members.key]
        members.load = [0] * members.spread.local
        block._modules[members.key] = Stubs(members, self._answer)

    def close(self) -> None:
        """The block is as it was."""
        self._block._modules[self._members.key] = self._held

    def _answer(self, index: int, rows: Tensor) -> DTensor:
        """Computes expert `index` on rows of any layout, in that layout; whole if they are on no rank, in part or as a
        sum of parts."""
        members, spread = self._members, self._members.spread
        mesh, axes = members.mesh, {*members.split, spread.axis}
        if type(rows) is not DTensor:  # the block made it: the same on all ranks
            rows = from_plain(rows, layout_of(mesh, (INVARIANT,) * len(mesh.sizes), tuple(rows.shape)))
        was, cause = rows.mesh_layout.base, f"{members.name} (experts)"
        outside = row_states(was.states, spread, False, frozenset())
        inside = _with(outside, axes, REPLICATE)
        local = convert(rows, was.with_states(inside), cause).to_local()
        dtype, here = members.gives or local.dtype, index - spread.first
        with members.state.computing(inside):
            if 0 <= here < spread.local:
                given = members.compute(index, local, inside).to(dtype)
                members.load[here] += prod(local.shape[:-1])
            else:
                given = _Elsewhere.apply(local, dtype)
            if torch.is_grad_enabled() and not given.requires_grad:  # a backward goes the same way on all ranks
                given.requires_grad_(any(one.requires_grad for one in members.modules[index].parameters()))
        members.replicas = tuple(
            axis for axis, state in enumerate(inside) if axis != spread.axis and not state.is_sharded
        )
        parts = was.with_states(_with(inside, axes, PARTIAL))
        return convert(from_plain(given, parts), was.with_states(outside), cause)


def _with(states: tuple[State, ...], axes: set[int], other: State) -> tuple[State, ...]:
    return tuple(other if axis in axes else state for axis, state in enumerate(states))


class _Elsewhere(torch.autograd.Function):
    """Stands for an expert of other ranks: zeros, whose backward reaches the rows as the others' does."""

    @staticmethod
    def forward(ctx, rows: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = rows.dtype
        return torch.zeros_like(rows, dtype=dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return torch.zeros_like(gradient, dtype=ctx.dtype), None
