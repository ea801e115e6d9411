"""Attention in a dry run: as the fused kernels hold memory, not as the formula that torch takes for meta tensors.

For a meta tensor torch chooses attention written out, which makes the [L, S] scores that no fused kernel keeps. Keys
that several heads share are repeated for the kernels of a CPU, which want as many as there are queries; a GPU's read
them as they are, and take values that are narrower than queries (multi-head latent attention), for which a CPU has none
but writes the scores out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor import register_rule
from vescale_dtensor.engine import TABLE, attention, flex_without_data


def repeated(shared: Tensor, heads: int) -> Tensor:
    """Keys or values of which each serves so many heads, one for each head."""
    return shared.repeat_interleave(heads, 1)


@contextlib.contextmanager
def fused_attention(repeats: bool = True) -> Iterator[None]:
    """Within the block, attention of DTensors without dropout, and flex_attention, make what a fused kernel makes, of
    a CPU if it `repeats`. For meta tensors."""
    before = TABLE[F.scaled_dot_product_attention]
    kernel = fused if repeats else partial(fused, repeat=None)

    @register_rule(F.scaled_dot_product_attention, exact=True)
    def rule(call):
        if call.get(4, "dropout_p", 0.0):
            return before.rule(call)
        decision = attention(call, kernel)
        if decision is not None and decision.run is None:
            decision.run = kernel
        return decision

    try:
        with flex_without_data(kernel):
            yield
    finally:
        TABLE[F.scaled_dot_product_attention] = before


def fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False, repeat: Callable[[Tensor, int], Tensor] | None = repeated,
) -> Tensor:  # fmt: skip
    """Replaces `F.scaled_dot_product_attention`; `repeat` as `repeated`, None for a kernel that reads shared keys."""
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if attn_mask is not None and attn_mask.requires_grad:  # a learned bias: its gradient is as large as the scores are
        return F.scaled_dot_product_attention(*given, scale=scale, enable_gqa=enable_gqa)
    apart = query.shape[-1] != value.shape[-1]
    written = apart and (repeat is not None or query.ndim != 4 or query.shape[1] != key.shape[1])
    if query.ndim != 4 or written or 0 in query.shape or 0 in key.shape:
        return F.scaled_dot_product_attention(*given, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)  # as the kernels do
    if apart:
        bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, bias, query.requires_grad, 0.0, is_causal, scale=scale)[0]
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and repeat is not None:
        key, value = repeat(key, groups), repeat(value, groups)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
