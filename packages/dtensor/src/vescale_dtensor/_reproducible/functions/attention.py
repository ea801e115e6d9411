"""Attention in the reproducible mode: every batch index and head is a product of its own.

What runs on the shards is `attend`, torch's math path; batch and heads may be sharded, the sequence is whole.
Grouped queries repeat their keys and values first.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

from ..grid import Cut
from ..tree import wide
from .product import Labels, Product
from .rows import Softmax


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float | Tensor = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Replaces F.scaled_dot_product_attention; `dropout_p` may be the noise [..., L, S] itself."""
    dtype = query.dtype
    shape = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    query, key, value = (wide(x).expand(*shape, *x.shape[-2:]).flatten(0, -3) for x in (query, key, value))
    if query.ndim == 2:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    (length, width), (reach, depth) = query.shape[-2:], value.shape[-2:]
    cuts = {name: Cut(1, size, (0,)) for name, size in (("l", length), ("s", reach), ("e", width), ("v", depth))}
    scores = Product.apply(query * scale, key, Labels(("b", "l", "e"), ("b", "s", "e"), ("b", "l", "s")), cuts)
    if is_causal:
        attn_mask = torch.ones(length, reach, dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.view(*shape, length, reach)
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
        else:
            scores = scores + wide(attn_mask)
    weights = Softmax.apply(scores, False, True)
    if isinstance(dropout_p, Tensor):
        weights = weights.view(dropout_p.shape) * dropout_p
    elif dropout_p:
        weights = weights * torch.empty_like(weights).bernoulli_(1 - dropout_p).div_(1 - dropout_p)
    weights = weights.reshape(-1, length, reach)
    out = Product.apply(weights, value, Labels(("b", "l", "s"), ("b", "s", "v"), ("b", "l", "v")), cuts)
    return out.view(*shape, length, depth).to(dtype)


def kernel_for(kernel: Callable) -> Callable:
    """Replaces a kernel of attention (`products/attention.py`): any, for all take the same arguments."""
    return attend


def repeated(x: Tensor, count: int) -> Tensor:
    """Every head `count` times: [..., H, S, E] -> [..., H * count, S, E], by the functions of torch."""
    shape = x.shape
    x = x.unsqueeze(-3).expand(*shape[:-2], count, *shape[-2:])
    return x.reshape(*shape[:-3], shape[-3] * count, *shape[-2:])
