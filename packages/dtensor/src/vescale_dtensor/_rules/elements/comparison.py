"""Compares two tensors: a Python bool, the same on every rank.

Shards are compared where they lie, the second tensor in the first's layout, and one
byte per rank of each axis that shards them is gathered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..._conversions.convert import convert_operand
from ..._layouts.layout import layout_of
from ..._layouts.state import INVARIANT
from ..._tensor.tensor import DTensor
from ..registry import Call, decomposed, rule
from ..solvers.parts import plain, reduced, rows
from ..traits import Trait


def _on_all_shards(function, compare: Callable[[Tensor, Tensor], bool], first: Tensor, second: Tensor) -> bool:
    """True if `compare` holds for every pair of shards of two tensors of one shape."""
    with torch.no_grad():
        if type(first) is not DTensor:
            return _on_all_shards(function, lambda a, b: compare(b, a), second, first)
        first = reduced(first.detach(), function)
        layout = first._layout.base
        source = second._layout.base if type(second) is DTensor else layout.invariant
        second = convert_operand(second.detach(), source, layout, function)
        same = torch.tensor([compare(plain(first), plain(second))], device=first.device)
        axes = [axis for axis, state in enumerate(layout.states) if state.kind == "S"]
        whole = layout_of(layout.mesh, (INVARIANT,) * layout.mesh.ndim, (1,))
        return bool(rows(same, whole, axes, function).all())


@rule(torch.equal, Tensor.equal, traits=Trait.READS)
def equal(call: Call):
    def run(input: Tensor, other: Tensor) -> bool:
        return input.shape == other.shape and _on_all_shards(call.function, torch.equal, input, other)

    return decomposed(run)


@rule(torch.allclose, Tensor.allclose, traits=Trait.READS)
def allclose(call: Call):
    def run(input: Tensor, other: Tensor, rtol=1e-05, atol=1e-08, equal_nan=False) -> bool:
        if input.shape != other.shape:  # broadcast
            return bool(plain(torch.isclose(input, other, rtol, atol, equal_nan).all()))

        def close(a: Tensor, b: Tensor) -> bool:
            return torch.allclose(a, b, rtol, atol, equal_nan)

        return _on_all_shards(call.function, close, input, other)

    return decomposed(run)
