"""new_zeros and its kin: tensors of given GLOBAL sizes, with the type and device of another. Whole and alike (I)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._layouts.layout import layout_of
from ..._layouts.state import INVARIANT
from ..registry import Call, Decision, rule
from ..traits import Trait


def _whole(call: Call, shape) -> Decision:
    return Decision(targets=(None,), out=layout_of(call.mesh, (INVARIANT,) * call.mesh.ndim, tuple(shape)))


@rule(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_empty_strided, traits=Trait.METADATA)
def sized(call: Call):
    return _whole(call, call.rest(1, "size"))


@rule(Tensor.new_full, traits=Trait.METADATA)
def filled(call: Call):
    size = call.get(1, "size")
    return _whole(call, size) if len(call.operands) == 1 else None


@rule(Tensor.new_tensor, traits=Trait.METADATA)
def from_data(call: Call):
    """From numbers; a tensor as data is copied by the fallback."""
    if len(call.operands) != 1:
        return None
    return _whole(call, torch.tensor(call.get(1, "data")).shape)
