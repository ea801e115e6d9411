"""as_strided: sizes, strides and an offset in the memory of one device's tensor.

    replicated                                 the memory of this rank, as it is
    row-major, in memory of its own            made whole: the same memory then
    a view of a part of such a tensor          the whole of that one, if the offset is given and no gradient flows
    else                                       OperatorError, on all ranks
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from ..._conversions.convert import describe
from ..._dispatch.copies import is_copy
from ..._dispatch.signature import Signature
from ..._errors import OperatorError
from ..._layouts.strides import global_stride, row_major
from ..._tensor.construct import from_local
from ..._tensor.tensor import DTensor, local_only
from ...placement import Partial
from ..registry import Call, decomposed, rule
from ..traits import Trait


class Memory(enum.IntEnum):
    """One device's memory of a tensor, as a rank knows it; of what several know the greatest holds."""

    OWN = 0
    PART_OF_ANOTHER = 1
    OUT_OF_ORDER = 2
    UNKNOWN = 3


_RULES = {
    Memory.PART_OF_ANOTHER: "where this view begins in the memory of one device, and what lies around it there, does "
    "not follow from the shards",
    Memory.OUT_OF_ORDER: "strides describe memory, and this tensor's dims are not in row-major order there",
    Memory.UNKNOWN: "on one device it is a view, and here a copy, or a part of a tensor that is no DTensor: what lies "
    "around it in memory is not known",
}
_REMEDIES = {
    Memory.PART_OF_ANOTHER: ("base.as_strided(size, stride, storage_offset)", "of the tensor that the view is of"),
    Memory.OUT_OF_ORDER: ("input.contiguous().as_strided(...)", "strides of a tensor in row-major order"),
    Memory.UNKNOWN: ("input.clone().as_strided(...)", "strides and an offset in memory of its own"),
}


@rule(Tensor.as_strided, torch.as_strided, traits=Trait.VIEW | Trait.LINEAR)
def as_strided(call: Call):
    """Strides of the whole tensor, which must be row-major: the shards' memory tells no other. It is made whole."""
    return decomposed(_as_strided)


def _as_strided(input: Tensor, size, stride, storage_offset: int | None = None) -> Tensor:
    from ..._dispatch.dispatch import call

    memory = _agreed(input)
    if memory is Memory.PART_OF_ANOTHER and storage_offset is not None:
        with local_only():
            base = None if torch.is_grad_enabled() and input.requires_grad else input._base
        if base is not None:
            return _as_strided(base.detach(), size, stride, storage_offset)
    if memory is not Memory.OWN:
        raise OperatorError(
            "as_strided", _RULES[memory], [describe("input", input, input._layout)], [_REMEDIES[memory]]
        )
    return call(_strided, input, tuple(size), tuple(stride), storage_offset)


def _agreed(input: DTensor) -> Memory:
    """Ranks know unlike much of it: of a shard with one index of a dim, or with none, all strides are right, and
    summands are made each in its way. So they ask each other."""
    layout = input._layout.base
    known = Memory.UNKNOWN if is_copy(input) else Memory.OWN if layout.is_replicated else _known(input)
    if layout.is_replicated:
        return known
    with local_only():
        own = torch.tensor(int(known), device=input.device)
    return Memory(int(from_local(own, layout.mesh.device_mesh, [Partial("max")] * layout.mesh.ndim, shape=())))


def _known(input: DTensor) -> Memory:
    layout = input._layout.base
    if layout.flat_axis is not None:  # a part of a buffer, in order
        return Memory.OWN
    with local_only():
        base = input._base if input._is_view() else input
        strides, sizes = input.stride(), input.shape
        if base.numel() != input.numel():
            return Memory.PART_OF_ANOTHER if type(base) is DTensor else Memory.UNKNOWN
    found = global_stride(strides, sizes, layout)
    steps = [(one, step) for one, step, n in zip(found or (), row_major(layout.shape), layout.shape) if n > 1]
    return Memory.OWN if found is not None and all(one == step for one, step in steps) else Memory.OUT_OF_ORDER


def _strided(tensor: Tensor, size: tuple, stride: tuple, storage_offset: int | None) -> Tensor:
    return tensor.as_strided(size, stride, storage_offset)


@rule(_strided, traits=Trait.VIEW | Trait.LINEAR)
def strided(call: Call):
    size = call.args[1]
    labels = tuple(("strided", d) for d in range(len(size)))
    return Signature([(None,) * call.operands[0].ndim], [labels], linear=[(0,)], shapes=[size])
