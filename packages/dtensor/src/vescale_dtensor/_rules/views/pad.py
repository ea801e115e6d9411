"""Functions that move or blank elements along some dims: pad, roll, flip, rot90, tril, triu, diagonals.

    dims they do not touch     keep their sharding
    dims they touch            whole; tril and triu take contiguous shards as they are, a pad of one dim
                               chunks that are dealt out (`shift`)
    partial input              partial, but for a pad with a value other than zero

A diagonal touches both of its dims.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._dispatch.signature import Signature
from ..._layouts.layout import Layout, layout_of
from ..._layouts.state import State
from ..empty import guarded
from ..registry import Call, Decision, Operand, both, rule
from ..traits import VIEWS, Trait
from .shift import Shift, shift_of, shifted


def touching(call: Call, dims: Iterable[int] | None, *, linear: bool = True, shape=None) -> Signature | None:
    """`dims` (None: all) of operand 0 whole, the others free; the output has the same dims."""
    x = call.operands[0]
    touched = set(range(x.ndim)) if dims is None else {dim % x.ndim for dim in dims} if x.ndim else set()
    labels = tuple(None if dim in touched else dim for dim in range(x.ndim))
    return Signature([labels], [labels], linear=[(0,)] if linear else (), shapes=[x.shape if shape is None else shape])


def _dims(given: object, x: Operand) -> tuple[int, ...] | None:
    """Dims as torch takes them, one or several; None when one is out of range."""
    dims = (given,) if isinstance(given, int) else tuple(given)
    return dims if all(-x.ndim <= dim < x.ndim for dim in dims) else None


@rule(F.pad, torch.constant_pad_nd, exact=True)
def pad(call: Call):
    """Only padded (or, negative, cropped) dims must be whole."""
    x = call.operands[0]
    widths = call.get(1, "pad")
    if len(call.operands) > 1 or not isinstance(widths, (tuple, list)) or len(widths) % 2 or len(widths) > 2 * x.ndim:
        return None
    fixed = call.function is torch.constant_pad_nd
    mode = "constant" if fixed else call.get(2, "mode", "constant")
    value = call.get(2 if fixed else 3, "value", 0)
    pairs = [(0, 0)] * (x.ndim - len(widths) // 2) + list(zip(widths[-2::-2], widths[::-2]))
    shape = tuple(size + before + after for size, (before, after) in zip(x.shape, pairs))
    if any(size < 0 for size in shape):
        return None
    touched = [dim for dim, pair in enumerate(pairs) if pair != (0, 0)]
    if mode != "constant" and 0 in x.shape:
        return None
    if mode == "constant" and len(touched) == 1 and not (value and x.layout.is_partial):
        moved = shift_of(x.layout, touched[0], -pairs[touched[0]][0], shape[touched[0]])
        if moved is not None:
            return _shifting(x.layout, *moved, shape, value or 0)
    signature = touching(call, touched, linear=mode != "constant" or not value, shape=shape)
    if mode != "constant":
        signature.local = guarded(call.function)
    return signature


def _shifting(layout: Layout, shift: Shift, state: State, shape: tuple[int, ...], value: float) -> Decision:
    """A pad that leaves its dim cut."""
    states = [state if axis == shift.axis else s for axis, s in enumerate(layout.states)]

    def run(input: Tensor, *args, **kwargs) -> Tensor:
        return shifted(shift, input, value)

    return Decision(targets=(None,), out=layout_of(layout.mesh, states, shape), run=run)


@rule(both("roll"), traits=Trait.MOVES | Trait.LINEAR)
def roll(call: Call):
    """Without dims it rolls the flattened tensor: all whole."""
    dims = call.get(2, "dims", None)
    if dims is None or dims == () or dims == []:
        return touching(call, None)
    dims = _dims(dims, call.operands[0])
    return None if dims is None else touching(call, dims)


@rule(both("flip"), traits=Trait.MOVES | Trait.LINEAR)
def flip(call: Call):
    dims = call.rest(1, "dims")
    dims = None if dims is None else _dims(dims, call.operands[0])
    return None if dims is None else touching(call, dims)


@rule(both("fliplr"), traits=Trait.MOVES | Trait.LINEAR)
def fliplr(call: Call):
    return touching(call, (1,)) if call.operands[0].ndim > 1 else None


@rule(both("flipud"), traits=Trait.MOVES | Trait.LINEAR)
def flipud(call: Call):
    return touching(call, (0,)) if call.operands[0].ndim else None


@rule(both("rot90"), traits=Trait.MOVES | Trait.LINEAR)
def rot90(call: Call):
    x = call.operands[0]
    dims = _dims(call.get(2, "dims", (0, 1)), x)
    if dims is None or len(dims) != 2:
        return None
    a, b = (dim % x.ndim for dim in dims)
    shape = list(x.shape)
    if call.get(1, "k", 1) % 2:
        shape[a], shape[b] = shape[b], shape[a]
    return touching(call, (a, b), shape=tuple(shape))


@rule(both("tril", "triu"), traits=Trait.MOVES | Trait.LINEAR)
def triangle(call: Call):
    """Rows and columns sharded in one range: the diagonal moves by where the shard begins. No communication."""
    x = call.operands[0]
    diagonal = call.get(1, "diagonal", 0)
    if x.ndim < 2:
        return None
    rows, columns = x.ndim - 2, x.ndim - 1
    whole = {dim for dim in (rows, columns) if any(not x.states[axis].in_one_piece for axis in x.layout.axes_of(dim))}
    function = call.function

    def local(outs):
        region = outs[0].region_at(outs[0].mesh.coordinate)
        first_row, first_column = (region[dim][0][0] if region[dim] else 0 for dim in (rows, columns))
        shifted = diagonal + first_row - first_column
        return lambda input, *args, **kwargs: function(input, shifted)

    labels = tuple(range(x.ndim))
    return Signature([labels], [labels], linear=[(0,)], whole=whole, local=local)


# --- diagonals: their two dims are whole -------------------------------------------


@rule(torch.diagonal, Tensor.diagonal, torch.linalg.diagonal, traits=VIEWS)
def diagonal(call: Call):
    """Both dims are whole; the diagonal is the last dim of the result."""
    x = call.operands[0]
    on_matrix = call.function is torch.linalg.diagonal
    first = 2 if not on_matrix else 99
    dims = _dims(
        (call.get(first, "dim1", -2 if on_matrix else 0), call.get(first + 1, "dim2", -1 if on_matrix else 1)), x
    )
    if dims is None:
        return None
    pair = {dim % x.ndim for dim in dims}
    if len(pair) != 2:
        return None
    labels = tuple(None if dim in pair else dim for dim in range(x.ndim))
    length = _diagonal_length(x.shape[dims[0]], x.shape[dims[1]], call.get(1 if not on_matrix else 99, "offset", 0))
    kept = [dim for dim in range(x.ndim) if dim not in pair]
    return Signature([labels], [(*kept, None)], linear=[(0,)], shapes=[(*(x.shape[dim] for dim in kept), length)])


def _diagonal_length(rows: int, columns: int, offset: int) -> int:
    return max(0, min(rows + min(offset, 0), columns - max(offset, 0)))


@rule(torch.diag, Tensor.diag, traits=Trait.MOVES | Trait.LINEAR)
def diag(call: Call):
    x = call.operands[0]
    offset = call.get(1, "diagonal", 0)
    if x.ndim == 2:
        return Signature([(None, None)], [(None,)], linear=[(0,)], shapes=[(_diagonal_length(*x.shape, offset),)])
    if x.ndim != 1:
        return None
    side = x.shape[0] + abs(offset)
    return Signature([(None,)], [(None, None)], linear=[(0,)], shapes=[(side, side)])


@rule(torch.trace, Tensor.trace, traits=Trait.LINEAR)
def trace(call: Call):
    return Signature([(None, None)], [()], linear=[(0,)], shapes=[()]) if call.operands[0].ndim == 2 else None
