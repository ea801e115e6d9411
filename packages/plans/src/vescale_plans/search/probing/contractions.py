"""The operators that contract activations with a parameter: a table from operator to one common form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .operands import Operands

aten = torch.ops.aten


@dataclass(frozen=True)
class Form:
    """One call, brought to `out[row, m] = sum over k of x[row, k] * weight[k, m]`.

    Arguments:
        x: the activation with its features last, [..., K]; None if rows are looked up.
        weight: the operand that stands for a parameter.
        in_dim, out_dim: of the operand `weight`; in_dim is None for a look-up.
        out_shape: of the operator's result.
        feature: the dim of the result that holds the out features.
        bias: the parameter added to the result, if any.
        rows: the integers looked up.
        scattered: rows are dealt out by value (experts).
    """

    x: Tensor | None
    weight: Tensor
    in_dim: int | None
    out_dim: int
    out_shape: tuple[int, ...]
    feature: int = -1
    bias: Tensor | None = None
    rows: Tensor | None = None
    scattered: bool = False


Reader = Callable[[Operands, tuple, dict[str, Any]], Form | None]


def _is_weight(operands: Operands, tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_meta and tensor.ndim > 1 and operands.name(tensor) is not None


def _product(operands: Operands, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Form | None:
    """a [.., N, K] @ b [.., K, M]; the parameter may be either."""
    shape = (*a.shape[:-1], b.shape[-1])
    if _is_weight(operands, b) and not a.is_meta:
        return Form(a, b, b.ndim - 2, b.ndim - 1, shape, bias=bias)
    if _is_weight(operands, a) and not b.is_meta:
        return Form(b.transpose(-1, -2), a, a.ndim - 1, a.ndim - 2, shape, feature=len(shape) - 2)
    return None


def _vector(operands: Operands, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Form | None:
    if not _is_weight(operands, weight) or x.is_meta:
        return None
    return Form(x[None], weight, 1, 0, (weight.shape[0],), bias=bias)


def _grouped(operands: Operands, args: tuple, kwargs: dict) -> Form | None:
    x, weight = args[:2]
    if not _is_weight(operands, weight) or x.is_meta or weight.ndim != 3 or x.ndim != 2:
        return None
    return Form(x, weight, 1, 2, (x.shape[0], weight.shape[2]), scattered=True)


def _convolution(operands: Operands, args: tuple, kwargs: dict) -> Form | None:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if not _is_weight(operands, weight) or x.is_meta or groups != 1:
        return None
    meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
    out = aten.convolution.default(
        meta, torch.empty_like(weight), None, stride, padding, dilation, transposed, output_padding, groups
    )
    inward, outward = (0, 1) if transposed else (1, 0)
    return Form(x.movedim(1, -1), weight, inward, outward, tuple(out.shape), feature=1, bias=bias)


def _look_up(operands: Operands, weight: Tensor, rows: Tensor) -> Form | None:
    if not _is_weight(operands, weight) or weight.ndim != 2 or rows.is_meta:
        return None
    return Form(None, weight, None, 1, (*rows.shape, weight.shape[1]), rows=rows)


def _index(operands: Operands, args: tuple, kwargs: dict) -> Form | None:
    weight, indices = args[:2]
    if len(indices) != 1 or indices[0] is None or indices[0].dtype == torch.bool:
        return None
    return _look_up(operands, weight, indices[0])


def _index_select(operands: Operands, args: tuple, kwargs: dict) -> Form | None:
    weight, dim, rows = args
    return _look_up(operands, weight, rows) if dim == 0 else None


READERS: dict[Any, Reader] = {
    aten.mm.default: lambda operands, args, _: _product(operands, *args[:2]),
    aten.bmm.default: lambda operands, args, _: _product(operands, *args[:2]),
    aten.addmm.default: lambda operands, args, _: _product(operands, args[1], args[2], args[0]),
    aten.baddbmm.default: lambda operands, args, _: _product(operands, args[1], args[2], args[0]),
    aten.mv.default: lambda operands, args, _: _vector(operands, *args[:2]),
    aten.addmv.default: lambda operands, args, _: _vector(operands, args[1], args[2], args[0]),
    aten.convolution.default: _convolution,
    aten.embedding.default: lambda operands, args, _: _look_up(operands, *args[:2]),
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
}
if hasattr(aten, "_grouped_mm"):
    READERS[aten._grouped_mm.default] = _grouped


def read(operands: Operands, function: Any, args: tuple, kwargs: dict[str, Any]) -> Form | None:
    """The call as a contraction with a parameter; None if it is not one."""
    reader = READERS.get(function)
    return None if reader is None else reader(operands, args, kwargs)
