"""new_zeros and its kin: tensors of given GLOBAL sizes, with the type and device of another.

    new_zeros, new_ones, new_full, new_tensor    whole and alike (I): constants, which are cut for free where they meet
    new_empty                                    cut as the other along the leading dims that are as large, else I
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..._layouts.layout import layout_of
from ..._layouts.state import INVARIANT, State
from ..registry import Call, Decision, rule
from ..traits import Trait


def zeroed(function: Callable) -> Callable:
    """`function`, whose result is noted to be zeros: parts of sums may be added to it (`_dispatch/sums.py`)."""

    def run(*args, **kwargs) -> Tensor:
        out = function(*args, **kwargs)
        out._zeros = True
        return out

    return run


def _replicated(call: Call, shape) -> Decision:
    run = zeroed(call.function) if call.function is Tensor.new_zeros else None
    return Decision(targets=(None,), out=layout_of(call.mesh, (INVARIANT,) * call.mesh.ndim, tuple(shape)), run=run)


@rule(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty_strided, traits=Trait.METADATA)
def sized(call: Call):
    return _replicated(call, call.rest(1, "size"))


@rule(Tensor.new_empty, traits=Trait.METADATA)
def unwritten(call: Call):
    """Makes unwritten tensors, most often filled with parts of the tensor that it was asked of: whole, it would make
    each of them be gathered."""
    size = call.rest(1, "size")
    if any(type(one) is not int for one in size):
        return _replicated(call, size)
    like = call.operands[0]

    def cut(state: State) -> bool:
        return state.kind == "S" and size[: state.dim + 1] == tuple(like.shape[: state.dim + 1])

    out = layout_of(call.mesh, tuple(state if cut(state) else INVARIANT for state in like.states), size)

    def run(tensor: Tensor, *_, size=None, **kwargs) -> Tensor:
        return tensor.new_empty(out.local_shape, **kwargs)

    return Decision(targets=(None,), out=out, run=run)


@rule(Tensor.new_full, traits=Trait.METADATA)
def filled(call: Call):
    size = call.get(1, "size")
    return _replicated(call, size) if len(call.operands) == 1 else None


@rule(Tensor.new_tensor, traits=Trait.METADATA)
def from_data(call: Call):
    """Makes tensors from numbers; a tensor as data is copied by the fallback."""
    if len(call.operands) != 1:
        return None
    return _replicated(call, torch.tensor(call.get(1, "data")).shape)
