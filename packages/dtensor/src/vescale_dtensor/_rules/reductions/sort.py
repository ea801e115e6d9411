"""Order along a dim: sort, argsort, topk, kthvalue, median, mode, quantile.

    other dims sharded     stay sharded
    topk along a sharded   each rank's k best are gathered, and the k best of these taken; indices are global
    the rest along a       another dim is sharded instead (an all-to-all), or x is gathered
      sharded dim
    partial input          reduces first
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._conversions.convert import convert_operand
from ..._dispatch.signature import Signature
from ..._layouts.layout import Layout, layout_of
from ..._layouts.region import cut_sizes
from ..._layouts.state import INVARIANT, sharded
from ..._tensor.tensor import DTensor, attach
from ..registry import Call, Operand, decomposed, rule
from ..solvers.parts import along, argument, attached, dims_of, plain, positions, reduced, reduction, source_of, splits


def _one_dim(call: Call, position: int, default: int = -1) -> tuple[int, ...] | None:
    dim = argument(call, position, "dim", default, other="axis")
    return dims_of(dim, call.operands[0].ndim) if isinstance(dim, int) and len(call.operands) == 1 else None


@rule(torch.sort, Tensor.sort, torch.argsort, Tensor.argsort)
def sort(call: Call):
    dims = _one_dim(call, 1)
    return None if dims is None else along(call, dims, outputs=1 if call.name == "argsort" else 2)


@rule(torch.msort, Tensor.msort)
def msort(call: Call):
    return along(call, (0,))


@rule(torch.kthvalue, Tensor.kthvalue)
def kthvalue(call: Call):
    dims = _one_dim(call, 2)
    return None if dims is None else reduction(call, dims, bool(call.get(3, "keepdim", False)), outputs=2)


@rule(torch.mode, Tensor.mode)
def mode(call: Call):
    dims = _one_dim(call, 1)
    return None if dims is None else reduction(call, dims, bool(call.get(2, "keepdim", False)), outputs=2)


@rule(torch.median, Tensor.median, torch.nanmedian, Tensor.nanmedian)
def median(call: Call):
    """Median of all elements, or along a dim with indices."""
    if argument(call, 1, "dim", other="axis") is None:
        return reduction(call, range(call.operands[0].ndim), False)
    dims = _one_dim(call, 1)
    return None if dims is None else reduction(call, dims, bool(call.get(2, "keepdim", False)), outputs=2)


@rule(torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile)
def quantile(call: Call):
    """Several quantiles (q is 1-D) come in a new leading dim."""
    x, q = call.get(0, "input"), call.get(1, "q")
    dims = dims_of(argument(call, 2, "dim", other="axis"), x.ndim) if isinstance(x, Operand) else None
    if dims is None:
        return None
    keepdim = bool(argument(call, 3, "keepdim", False, other="keepdims"))
    labels = tuple(range(x.ndim))
    kept = [(None if d in dims else d) for d in labels if keepdim or d not in dims]
    several = q.shape if isinstance(q, Operand) else ()
    shape = (*several, *[1 if d is None else x.shape[d] for d in kept])
    inputs = [labels if operand is x else (None,) * operand.ndim for operand in call.operands]

    def local(outs: tuple[Layout, ...]):
        shape = outs[0].local_shape

        def run(input: Tensor, *args, **kwargs) -> Tensor:  # torch refuses an empty shard
            return call.function(input, *args, **kwargs) if input.numel() else input.sum(dims, keepdim).expand(shape)

        return run

    return Signature(inputs, [(*[None] * len(several), *kept)], whole=set(dims), shapes=[shape], local=local)


@rule(torch.topk, Tensor.topk)
def topk(call: Call):
    """Candidates only while they are fewer than the dim is long: else the dim is made whole."""
    dims, k = _one_dim(call, 2), call.get(1, "k")
    if not dims or not isinstance(k, int):
        return None
    (x,) = call.operands
    (dim,) = dims
    largest, ordered = bool(call.get(3, "largest", True)), bool(call.get(4, "sorted", True))
    axes = splits(x.layout, dims)
    if len(axes) == 1 and 0 < k * x.layout.mesh.sizes[axes[0]] < x.shape[dim]:
        return decomposed(
            lambda *args, **kwargs: _topk(source_of(args, kwargs), k, dim, largest, ordered, call.function)
        )
    labels = tuple(range(x.ndim))
    out = tuple(None if d == dim else d for d in labels)
    shape = tuple(k if d == dim else size for d, size in enumerate(x.shape))
    return Signature([labels], [out, out], whole={dim}, shapes=[shape, shape], single=False)


def _topk(x: DTensor, k: int, dim: int, largest: bool, ordered: bool, function):
    x = reduced(x, function)
    layout = x._layout.base
    mesh, (axis,) = layout.mesh, splits(layout, (dim,))
    counts = tuple(min(k, size) for size in cut_sizes(layout.states[axis], layout.shape[dim], mesh.sizes[axis]))
    shape = (*layout.shape[:dim], sum(counts), *layout.shape[dim + 1 :])
    states = list(layout.states)
    states[axis] = sharded(dim, units=counts)
    source = layout_of(mesh, states, shape)
    states[axis] = INVARIANT
    target = layout_of(mesh, states, shape)

    def joined(candidates: Tensor) -> Tensor:
        return plain(convert_operand(attach(candidates, source), source, target, function))

    local = plain(x)
    values, at = local.topk(counts[mesh.coordinate[axis]], dim, largest, False)
    everything, indices = joined(values), joined(positions(layout, dim, at.device)[at])
    values, at = everything.topk(k, dim, largest, ordered)
    out = target.with_shape((*shape[:dim], k, *shape[dim + 1 :]))
    return torch.return_types.topk((attached(values, out), attached(indices.gather(dim, at), out)))
