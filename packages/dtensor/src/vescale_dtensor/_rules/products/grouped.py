"""Products of groups of rows with a matrix each: what experts in a stack compute.

rows [t, k] in groups, stack [e, k, n]      columns of the stack sharded: free; its contracted dim on both: -> P
rows and the number of groups               whole: where a group ends is known of all rows alone
"""

from __future__ import annotations

from math import prod

from ..._dispatch.signature import Signature
from ..._torch_private import _grouped_mm
from ..empty import guarded
from ..registry import Call, rule

ALIGNED = 8
"""Elements in 16 bytes of the smallest dtype that the kernels take: they want rows of multiples of that."""


@rule(_grouped_mm)
def grouped_mm(call: Call) -> Signature | None:
    """rows [t, k], stack [e, k, n], offs [e] -> [t, n]."""
    if len(call.operands) != 3 or (call.operands[0].ndim, call.operands[1].ndim) != (2, 3):
        return None  # a bias, or both in groups
    rows, stack, _ = call.operands
    (t, k), n = rows.shape, stack.shape[2]
    whole = {label for label, size in (("k", k), ("n", n)) if not _stays_aligned(call, size)}
    return Signature(
        [(None, "k"), (None, "k", "n"), (None,)], [(None, "n")], summed={"k"}, linear=[(0,), (1,)], whole=whole,
        shapes=[(t, n)], local=guarded(call.function),
    )  # fmt: skip


def _stays_aligned(call: Call, size: int) -> bool:
    """True if each cut that the solver may choose leaves every rank rows that the kernels take."""
    cuts = [state for operand in call.operands for state in operand.states if state.kind == "S"]
    axes = {axis for operand in call.operands for axis, state in enumerate(operand.states) if state.kind == "S"}
    if any(state.units is not None or state.order is not None for state in cuts):
        return False
    groups = max((state.groups for state in cuts), default=1)
    return size % (ALIGNED * groups * prod(call.mesh.sizes[axis] for axis in axes)) == 0
