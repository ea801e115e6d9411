"""Sums and what is made of sums: sum, mean, count_nonzero, histc, bincount, var; and prod, any, all.

    kept dim sharded       stays sharded, no communication
    reduced dim sharded    sums: P, no communication; the rest: a gather of one value per rank and output element
    partial input          sum and mean: P; the rest reduces first
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..._dispatch.signature import Signature
from ..._tensor.tensor import DTensor
from ..registry import Call, decomposed, rule
from ..solvers.parts import argument, combined, dims_and_keepdim, dims_of, reduced, reducing, reduction, splits
from ..traits import Trait


def _linear(call: Call):
    """Partial stays partial, unless the parts would be rounded to integers."""
    dtype = call.kwargs.get("dtype")
    return [(0,)] if dtype is None or dtype.is_floating_point or dtype.is_complex else ()


@rule(torch.sum, Tensor.sum, traits=Trait.LINEAR)
def sum_rule(call: Call):
    found = dims_and_keepdim(call)
    return None if found is None else reduction(call, *found, summed=set(found[0]), linear=_linear(call))


@rule(torch.nansum, Tensor.nansum, torch.count_nonzero, Tensor.count_nonzero)
def counted(call: Call):
    """A sum of something that is not linear in the input."""
    found = dims_and_keepdim(call)
    return None if found is None else reduction(call, *found, summed=set(found[0]))


@rule(torch.histc, Tensor.histc)
def histogram(call: Call):
    """Each rank counts what it holds -> P, where the limits are given; those of the data are nobody's alone."""
    bins, low, high = argument(call, 1, "bins", 100), argument(call, 2, "min", 0), argument(call, 3, "max", 0)
    if low == high or len(call.operands) != 1 or not isinstance(bins, int):
        return None
    dims = tuple(("d", dim) for dim in range(call.operands[0].ndim))
    return Signature([dims], [("bin",)], summed=set(dims), shapes=[(bins,)])


@rule(torch.bincount, Tensor.bincount)
def bincount(call: Call):
    """Each rank counts what it holds; how many counts there are is for the largest value of all ranks to say."""
    (x, *weights) = call.operands
    if weights or x.ndim != 1 or not x.shape[0] or not splits(x.layout, (0,)):
        return None
    return decomposed(_counts)


def _counts(input: Tensor, weights: None = None, minlength: int = 0) -> Tensor:
    x, count = reduced(input, torch.bincount), minlength
    if x.dtype.is_floating_point:
        return torch.bincount(torch.empty(0, dtype=x.dtype))  # raises, as on one device
    if not x.is_meta or not count:  # in a dry run there are no values, and as many counts as are asked for
        low, high = map(int, torch.aminmax(x))
        if low < 0:
            return torch.bincount(torch.tensor([low]))  # raises, as on one device
        count = max(minlength, high + 1)
    return torch.histc(x.double(), count, -0.5, count - 0.5).long()


@rule(torch.mean, Tensor.mean, traits=Trait.LINEAR)
def mean(call: Call):
    """The local sum over the GLOBAL count is partial: uneven and empty shards are right."""
    found = dims_and_keepdim(call)
    if found is None:
        return None
    dims, keepdim = found
    (x,) = call.operands
    if not splits(x.layout, dims):
        return reduction(call, dims, keepdim, linear=_linear(call), summed=set(dims))
    count = prod(x.shape[d] for d in dims)
    run = _mean_of(count, dims, keepdim)
    return reduction(call, dims, keepdim, summed=set(dims), linear=_linear(call), local=lambda _: run)


def _mean_of(count: int, dims: tuple[int, ...], keepdim: bool):
    def run(input: Tensor, *args, dtype: torch.dtype | None = None, **kwargs) -> Tensor:
        dtype = dtype or input.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.mean(input)  # raises, as on one device
        return input.sum(dims, keepdim, dtype=dtype) / count

    return run


@rule(torch.nanmean, Tensor.nanmean)
def nanmean(call: Call):
    found = dims_and_keepdim(call)
    if found is None:
        return None

    def run(x: DTensor) -> Tensor:
        x = reduced(x, call.function)
        return x.nansum(*found, dtype=call.kwargs.get("dtype")) / x.isnan().logical_not().sum(*found)

    return reducing(call, *found, run)


@rule(torch.trace, Tensor.trace, traits=Trait.LINEAR)
def trace(call: Call):
    """The part of the diagonal that runs through the shard, partial; a shard of several pieces is made whole."""
    (x,) = call.operands
    layout = x.layout
    if x.ndim != 2 or any(s.kind == "S" and not s.in_one_piece for s in layout.states):
        return reduction(call, (0, 1), False) if x.ndim == 2 else None
    if not splits(layout, (0, 1)):
        return reduction(call, (0, 1), False, linear=[(0,)])
    (row, column) = (ranges[0][0] if ranges else 0 for ranges in layout.region_at(layout.mesh.coordinate))

    def run(input: Tensor) -> Tensor:
        return input.diagonal(row - column).sum()

    return reduction(call, (0, 1), False, summed={0, 1}, linear=[(0,)], local=lambda _: run)


# --- gathered: one value per rank and output element -----------------------------------


@rule(torch.prod, Tensor.prod)
def factors(call: Call):
    """The product of the local products; their gradients are right where a factor is zero, too."""
    found = dims_and_keepdim(call)
    if found is None:
        return None
    dims, keepdim = found
    dtype = call.kwargs.get("dtype")
    everything = argument(call, 1, "dim", other="axis") is None

    def part(local: Tensor) -> Tensor:
        return local.prod(dtype=dtype) if everything else local.prod(dims[0], keepdim, dtype=dtype)

    return reducing(call, *found, lambda x: combined(x, *found, call.function, part, lambda parts: parts.prod(0)))


@rule(torch.any, Tensor.any, torch.all, Tensor.all)
def boolean(call: Call):
    found = dims_and_keepdim(call)
    if found is None or argument(call, 1, "dim", other="axis") == ():  # torch reduces nothing then
        return None
    local = torch.any if call.name == "any" else torch.all
    part, whole = (lambda part: local(part, *found)), (lambda parts: local(parts, 0))
    return reducing(call, *found, lambda x: combined(x, *found, call.function, part, whole))


# --- variance ----------------------------------------------------------------------------


def _variance_arguments(call: Call):
    """(dims, keepdim, correction) of all overloads of var, or None."""
    if len(call.operands) != 1:
        return None
    (x,) = call.operands
    dim, unbiased = argument(call, 1, "dim", other="axis"), call.get(2, "unbiased", True)
    if isinstance(dim, bool):  # var(input, unbiased)
        dim, unbiased = None, dim
    dims = dims_of(dim, x.ndim)
    keepdim = bool(argument(call, 3, "keepdim", False, other="keepdims"))
    correction = call.kwargs.get("correction")
    return None if dims is None else (dims, keepdim, float(unbiased) if correction is None else correction)


@rule(torch.var, Tensor.var, torch.std, Tensor.std, torch.var_mean, torch.std_mean, exact=True)
def variance(call: Call):
    """Reduced dims sharded: two passes, the mean and then the squared distance from it, each one small all-reduce."""
    found = _variance_arguments(call)
    if found is None:
        return None
    dims, keepdim, correction = found
    pair = call.name.endswith("_mean")
    root = call.name.startswith("std")
    count = prod(call.operands[0].shape[d] for d in dims)

    def run(x: DTensor):
        x = reduced(x, call.function)
        spread, middle = _moments(x, dims, count - correction)
        spread = _root(spread) if root else spread
        spread = _as(spread, x, dims, keepdim)
        return (spread, _as(middle, x, dims, keepdim)) if pair else spread

    return reducing(call, dims, keepdim, run, outputs=2 if pair else 1)


def _moments(x: DTensor, dims: tuple[int, ...], freedom: float) -> tuple[DTensor, DTensor]:
    """(sum of squared distances over `freedom`, mean), dims kept, in at least float32."""
    x = upcast(x)
    middle = reduced(x.mean(dims, keepdim=True), "var")
    distance = x - middle
    squares = (distance * distance.conj()).real if x.is_complex() else distance * distance
    return squares.sum(dims, keepdim=True) / max(freedom, 0), middle


def upcast(x: DTensor) -> DTensor:
    """Half precision as float32, which is what torch's kernels accumulate in."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _root(variance: DTensor) -> DTensor:
    """The square root, with gradient zero if it is zero (as torch.std has it)."""
    variance = reduced(variance, "std")
    zero = variance == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, variance).sqrt())


def _as(value: DTensor, x: DTensor, dims: tuple[int, ...], keepdim: bool) -> DTensor:
    value = value if value.dtype == x.dtype or x.is_complex() else value.to(x.dtype)
    return value if keepdim else value.sum(dims)  # dims of size one: a sum is a squeeze, and linear
