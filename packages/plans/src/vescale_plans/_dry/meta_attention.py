"""Attention in a dry run: as the fused kernels hold memory, not as the formula that torch takes for meta tensors.

For a meta tensor torch chooses attention written out, which makes the [L, S] scores that no fused kernel keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor import register_rule
from vescale_dtensor.engine import TABLE, attention


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Within the block, attention of DTensors without dropout makes what a fused kernel makes. For meta tensors."""
    before = TABLE[F.scaled_dot_product_attention]

    @register_rule(F.scaled_dot_product_attention, exact=True)
    def rule(call):
        if call.get(4, "dropout_p", 0.0):
            return before.rule(call)
        decision = attention(call, fused)
        if decision is not None and decision.run is None:
            decision.run = fused
        return decision

    try:
        yield
    finally:
        TABLE[F.scaled_dot_product_attention] = before


def fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False,
) -> Tensor:  # fmt: skip
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if attn_mask is not None and attn_mask.requires_grad:  # a learned bias: its gradient is as large as the scores are
        return F.scaled_dot_product_attention(*given, scale=scale, enable_gqa=enable_gqa)
    if query.ndim != 4 or query.shape[-1] != value.shape[-1] or 0 in query.shape or 0 in key.shape:
        return F.scaled_dot_product_attention(*given, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)  # as the kernels do
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
