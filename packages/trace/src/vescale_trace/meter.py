"""Floating point operations of operators, and grouped products on meta tensors.

torch's own formulas, and what they leave out: attention on a CPU, or with keys that heads share, and grouped products,
of which torch's shape function takes bfloat16 alone, whatever the kernels take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten


def flops_of(packet: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Floating point operations of an operator; 0 for what is neither product, convolution nor attention."""
    count = _FLOPS.get(packet)
    return count(*args, **kwargs, out_val=out) if count is not None else 0


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(*_each_head(query, key, value))


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(gradient.shape, *_each_head(query, key, value))


def _each_head(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[int, ...]]:
    """Shapes with a head of key and value for each of the query's: torch's formulas of 2.11 take no groups."""
    return [(*one.shape[:-3], query.shape[-3], *one.shape[-2:]) for one in (query, key, value)]


def _grouped(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    """Operations of grouped products: every row, or column, meets one group's matrix."""
    if left.ndim == right.ndim == 3:
        return 2 * left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2]
    return 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _grouped_mm(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """[T, K] x [G, K, N] -> [T, N], [G, M, K] x [K, T] -> [M, T], [M, T] x [T, N] -> [G, M, N], and stacks."""
    if not left.is_meta:
        return _aten._grouped_mm.default(left, right, offs, bias, out_dtype)
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.ndim == right.ndim:
        shape = (offs.shape[0] if offs is not None and left.ndim == 2 else left.shape[0], *shape)
    return left.new_empty(shape, dtype=out_dtype)


_KERNELS = [
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
]
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **{getattr(_aten, name): _attention for name in _KERNELS},
    **{getattr(_aten, f"{name}_backward"): _attention_backward for name in _KERNELS},
}
ON_META: dict[Any, Callable] = {}
"""Operator -> what takes its place where it may meet meta tensors."""
if hasattr(_aten, "_grouped_mm"):
    _FLOPS.setdefault(_aten._grouped_mm, _grouped)
    ON_META[_aten._grouped_mm.default] = _grouped_mm
