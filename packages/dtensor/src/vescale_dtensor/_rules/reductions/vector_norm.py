"""Norms of vectors and of matrices as vectors: norm, vector_norm, dist, normalize.

    reduced dim whole      local
    reduced dim sharded    the sum of |x|^p is all-reduced (p = inf: the maximum gathered), then the root;
                           matrix norms other than Frobenius see the matrix whole
    partial input          reduces first
"""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._layouts.state import PARTIAL
from ..._tensor.tensor import DTensor
from ..registry import Call, Operand, decomposed, rule
from ..solvers.parts import (
    along,
    attached,
    dims_of,
    only_split,
    plain,
    reduced,
    reduced_layout,
    reduction,
    source_of,
    splits,
)  # fmt: skip
from .extremum import LARGEST, extremum


def vector_norm_of(x: DTensor, order: float, dims: tuple[int, ...], keepdim: bool, dtype, function) -> DTensor:
    """(sum |x|^order)^(1/order), order > 0, inf or 0, over dims of which some are sharded."""
    x = reduced(x, function)
    x = x if dtype is None else x.to(dtype)
    if order == inf:
        return extremum(x.abs(), dims, keepdim, LARGEST, function)
    layout = x._layout.base
    out = reduced_layout(layout, dims, keepdim)
    axes = splits(layout, dims)
    partial = out.with_states([PARTIAL if axis in axes else state for axis, state in enumerate(out.states)])
    local = plain(x)
    magnitudes = local.abs() if local.is_complex() else local
    dtype = magnitudes.dtype
    if dtype in (torch.bfloat16, torch.float16):
        magnitudes = magnitudes.float()
    total = plain(reduced(attached(_powers(magnitudes, order).sum(dims, keepdim), partial), function))
    return attached(_root(total, order).to(dtype), out)


def _powers(x: Tensor, order: float) -> Tensor:
    """|x|^order; its gradient at zero is zero, whatever the order."""
    if order == 2:
        return x * x
    if order == 1:
        return x.abs()
    if order == 0:
        return x.masked_fill(x != 0, 1).masked_fill(x == 0, 0)
    zero = x == 0
    return x.abs().masked_fill(zero, 1).pow(order).masked_fill(zero, 0)


def _root(total: Tensor, order: float) -> Tensor:
    if order in (0, 1):
        return total
    zero = total == 0
    return total.masked_fill(zero, 1).pow(1 / order).masked_fill(zero, 0)


def _vector(call: Call, order, dim, keepdim: bool, dtype):
    (x,) = call.operands
    dims = dims_of(dim, x.ndim)
    if dims is None or not x.layout.numel:
        return None
    if not only_split(call, dims) or order < 0:
        return reduction(call, dims, keepdim)
    order = float(order)
    return decomposed(
        lambda *args, **kwargs: vector_norm_of(_operand(args, kwargs), order, dims, keepdim, dtype, call.function)
    )


def _operand(args: tuple, kwargs: dict) -> Tensor:
    for name in ("x", "A"):  # linalg's names
        if name in kwargs:
            return kwargs[name]
    return source_of(args, kwargs)


def _matrix(call: Call, dim, keepdim: bool):
    dims = dims_of(dim, call.operands[0].ndim)
    return None if dims is None else reduction(call, dims, keepdim)


@rule(torch.linalg.vector_norm, exact=True)
def vector_norm(call: Call):
    if len(call.operands) != 1:
        return None
    get = call.kwargs.get
    return _vector(call, call.get(1, "ord", 2), call.get(2, "dim"), bool(call.get(3, "keepdim", False)), get("dtype"))


@rule(torch.norm, Tensor.norm, exact=True)
def norm(call: Call):
    """p of torch.norm: a number, None or "fro" (2), or "nuc"."""
    if len(call.operands) != 1:
        return None
    order, dim, keepdim = call.get(1, "p", "fro"), call.get(2, "dim"), bool(call.get(3, "keepdim", False))
    if order == "nuc":
        return _matrix(call, dim, keepdim)
    dtype = call.get(5 if call.function is torch.norm else 4, "dtype")
    return _vector(call, 2 if order in ("fro", None) else order, dim, keepdim, dtype)


@rule(torch.linalg.norm, exact=True)
def linalg_norm(call: Call):
    """A vector norm of all elements or along one dim; a matrix norm for an order with two dims."""
    if len(call.operands) != 1:
        return None
    (x,) = call.operands
    order, dim, keepdim = call.get(1, "ord"), call.get(2, "dim"), bool(call.get(3, "keepdim", False))
    dims = dims_of(dim, x.ndim)
    if dims is None:
        return None
    if order in (None, "fro") or (len(dims) == 1 and not isinstance(order, str)):
        return _vector(call, 2 if order in (None, "fro") else order, dim, keepdim, call.kwargs.get("dtype"))
    return _matrix(call, dim, keepdim)


@rule(torch.linalg.matrix_norm, exact=True)
def matrix_norm(call: Call):
    if len(call.operands) != 1:
        return None
    order, dim, keepdim = call.get(1, "ord", "fro"), call.get(2, "dim", (-2, -1)), bool(call.get(3, "keepdim", False))
    if order == "fro":
        return _vector(call, 2, dim, keepdim, call.kwargs.get("dtype"))
    return _matrix(call, dim, keepdim)


@rule(torch.dist, Tensor.dist)
def dist(call: Call):
    def run(input: Tensor, other: Tensor, p: float = 2) -> DTensor:
        return torch.linalg.vector_norm(input - other, p)

    return decomposed(run)


@rule(F.normalize)
def normalize(call: Call):
    """x over its norm along a dim; x stays sharded."""
    x = call.get(0, "input")
    dims = dims_of(call.get(2, "dim", 1), x.ndim) if isinstance(x, Operand) else None
    if dims is None or len(call.operands) != 1:
        return None
    if not only_split(call, dims):
        return along(call, dims)

    def run(input: DTensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> DTensor:
        x = reduced(input, call.function)
        return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)

    return decomposed(run)
