"""Running reductions: cumsum, cumprod, cummax, cummin, logcumsumexp, diff.

    other dims sharded          stay sharded
    cumsum, cumprod along a     local, then moved on by the totals of the shards before, which are gathered
      sharded dim
    the rest along a sharded    another dim is sharded instead (an all-to-all), or x is gathered
      dim
    partial input               cumsum: P; the rest reduces first
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch.signature import Signature
from ..._layouts.state import REPLICATE
from ..._tensor.tensor import DTensor
from ..registry import Call, Operand, both, decomposed, rule
from ..solvers.parts import (
    along,
    argument,
    attached,
    dims_of,
    only_split,
    plain,
    reduced,
    reduced_layout,
    rows,
    source_of,
    splits,
)  # fmt: skip


def _dims(call: Call):
    dim = argument(call, 1, "dim", other="axis")
    return dims_of(dim, call.operands[0].ndim) if isinstance(dim, int) and len(call.operands) == 1 else None


@rule(both("cumsum", "cumprod"))
def running(call: Call):
    dims = _dims(call)
    if dims is None:
        return None
    (x,) = call.operands
    cuts = [x.layout.states[axis] for axis in splits(x.layout, dims)]
    if only_split(call, dims) and all(cut.in_one_piece for cut in cuts):
        dtype = call.get(2, "dtype")
        sums = call.name == "cumsum"
        return decomposed(
            lambda *args, **kwargs: _moved_on(source_of(args, kwargs), dims[0], dtype, sums, call.function)
        )
    signature = along(call, dims)
    dtype = call.kwargs.get("dtype")
    if call.name.startswith("cumsum") and (dtype is None or dtype.is_floating_point or dtype.is_complex):
        signature.linear = [(0,)]
    return signature


def _moved_on(x: DTensor, dim: int, dtype: torch.dtype | None, sums: bool, function) -> DTensor:
    x = reduced(x, function)
    layout = x._layout.base
    axes = splits(layout, (dim,))
    rank = 0  # this shard's place among those of the dim
    for axis in axes:
        rank = rank * layout.mesh.sizes[axis] + layout.mesh.coordinate[axis]
    local = plain(x)
    total = local.sum(dim, dtype=dtype) if sums else local.prod(dim, dtype=dtype)
    before = rows(total, reduced_layout(layout, (dim,), False), axes, function, state=REPLICATE)[:rank]
    if sums:
        return attached(local.cumsum(dim, dtype=dtype) + before.sum(0).unsqueeze(dim), layout)
    return attached(local.cumprod(dim, dtype=dtype) * before.prod(0).unsqueeze(dim), layout)


@rule(torch.logcumsumexp, Tensor.logcumsumexp)
def logcumsumexp(call: Call):
    dims = _dims(call)
    return None if dims is None else along(call, dims)


@rule(torch.cummax, Tensor.cummax, torch.cummin, Tensor.cummin)
def extremes(call: Call):
    """Runs on plain tensors: the kernel's backward hands an empty input itself back as the gradient."""
    dims = _dims(call)
    if dims is None:
        return None
    signature = along(call, dims, outputs=2)
    signature.local = lambda _: lambda input, *args, **kwargs: call.function(plain(input), *args, **kwargs)
    return signature


@rule(torch.diff, Tensor.diff)
def diff(call: Call):
    """Differences of neighbours, `n` times, after `prepend` and `append` were joined on."""
    x = call.get(0, "input")
    n, dim = call.get(1, "n", 1), argument(call, 2, "dim", -1, other="axis")
    dims = dims_of(dim, x.ndim) if isinstance(x, Operand) and isinstance(dim, int) else None
    if not dims or any(operand.ndim != x.ndim for operand in call.operands):
        return None
    labels = tuple(None if d == dims[0] else d for d in range(x.ndim))
    length = max(sum(operand.shape[dims[0]] for operand in call.operands) - n, 0)
    shape = tuple(length if d == dims[0] else size for d, size in enumerate(x.shape))
    return Signature(
        [labels] * len(call.operands), [labels], shapes=[shape], linear=[tuple(range(len(call.operands)))]
    )
