"""Slices of one tensor that are converted one after another: the tensor is, once, and they are slices of that.

A scan over a sequence takes `x[:, i]` of what was computed for all positions, and each slice meets a shard. Each alone
would communicate, in backward or in both directions, as often as there are positions. The first two slices travel
alone, for they may stay the only ones; with the third the whole tensor does, and all others are views of it. A slice
that is much of the tensor has neighbours that are (the step, B and C of a state-space layer, rows dealt out to
experts): where only gradients travel, the whole's does at once, at no more than `WHOLE` times the bytes, or where all
of it is so little (`LITTLE` bytes) that another message takes longer. So does one of the parts into which rows were
split, however small: the others are there already.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .._layouts.layout import Layout, layout_of
from .._tensor.tensor import DTensor, attach
from .conversion import communicates
from .memo import recall, times_seen

ALONE = 2
"""Slices of one tensor that are converted before it is."""
WHOLE = 4
"""Times the elements of a slice that its tensor may have to be converted in its place."""
LITTLE = 2**18
"""Bytes that an all-reduce sends in about the time that it takes to begin."""

Make = Callable[[Tensor, Layout, Layout, bool, bool], Tensor]


def as_slice(make: Make, tensor: Tensor, source: Layout, target: Layout) -> Tensor | None:
    """Makes `make`'s result for `tensor` as a slice of that for the tensor that this is a view of; None if the tensor
    is to be converted itself. Call with dispatch disabled."""
    base = tensor._base
    if type(base) is not DTensor or not base.requires_grad or base.dtype is not tensor.dtype:
        return None
    whole = base._layout.base
    if whole.mesh is not source.mesh or whole.numel == source.numel or tensor.is_complex():
        return None
    states = []
    for own, before, after in zip(whole.states, source.states, target.states):
        if before is not after and (own is not before or before.kind not in "PIR" or after.kind not in "PIR"):
            return None  # a shard of a slice is not a slice of a shard
        states.append(own if before is after else after)
    if not (communicates(source, target) or communicates(target.gradient, source.gradient)):
        return None
    wanted = layout_of(whole.mesh, tuple(states), whole.shape)
    if recall(base, wanted) is None:
        seen = times_seen(base, wanted)
        much = whole.numel <= max(WHOLE * source.numel, LITTLE // base.element_size()) or _is_dealt(tensor, base)
        much = much and not communicates(source, target)
        if seen == 0 or seen <= ALONE and not much:
            return None
    found = make(base, whole, wanted, False, False)
    if found.stride() != base.stride():
        return None
    place = found.storage_offset() + tensor.storage_offset() - base.storage_offset()
    return attach(found.as_strided(tensor.size(), tensor.stride(), place), target)


def _is_dealt(tensor: Tensor, base: Tensor) -> bool:
    """True if it is one of the parts into which `base` was split by rows, as they are dealt out to experts."""
    name = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
    return name.startswith("Split") and tensor.shape[-1:] == base.shape[-1:]
