"""One tile of attention on local tensors: its result with the log of its sum of exponentials, and its gradients.

A kernel's backward takes the result and the log-sum-exp that it is told; given those of all columns together, what it
gives back is the tile's share of the gradients. So torch's own fused kernels do, on a CPU and on CUDA; where none
takes the operands (a mask with gradient, dropout's noise, values of another width than keys, more than four dims) the
same is written out, in float32 for halves.

`mask` is boolean (true: seen) or is added to the scores, as in F.scaled_dot_product_attention, and has no gradient
but in the written form; `noise` multiplies the weights after softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from .described import Held

aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)


class Scores(NamedTuple):
    """Turns scores of a tile into weights."""

    mask: Tensor | None
    noise: Tensor | None
    triangle: bool
    scale: float
    needs_mask: bool = False  # whether the mask has a gradient


class Kernel(NamedTuple):
    """forward(q, k, v, scores) -> (out, lse [..., rows], float32 or wider);
    backward(grad_out, q, k, v, out, lse, scores) -> (grad_q, grad_k, grad_v, grad of the mask or None)."""

    forward: Callable[[Tensor, Tensor, Tensor, Scores], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


def kernel_for(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | Held | None, noise: Tensor | None) -> Kernel:
    """The kernel that takes operands like these; k and v may have fewer heads, in equal groups."""
    fused = query.ndim == 4 and noise is None and query.shape[-1] == value.shape[-1]
    fused = fused and query.dtype == key.dtype == value.dtype and not (mask is not None and mask.requires_grad)
    if fused and mask is not None:
        fused = mask.ndim in (2, 4) and (mask.dtype == torch.bool or mask.dtype == query.dtype)
    if not fused:
        return WRITTEN
    if query.device.type == "cuda":
        return CUDA if query.dtype != torch.float64 else WRITTEN
    return CPU if query.device.type in ("cpu", "meta") else WRITTEN


# --- torch's fused kernels ---------------------------------------------------------


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    mask = _additive(scores.mask, query.dtype)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, scores.triangle, attn_mask=mask, scale=scores.scale
    )
    return out, _marked(lse, scores.mask)


def _cpu_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scores: Scores):
    mask = _additive(scores.mask, query.dtype)
    return *aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, 0.0, scores.triangle, attn_mask=mask, scale=scores.scale
    ), None


def _cuda_forward(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """The memory-efficient kernel: it takes masks, and every dtype."""
    key, value = _per_query(query, key, value)
    bias = _bias(scores.mask, query, key)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, scores.triangle, scale=scores.scale
    )
    return out, _marked(lse[..., : query.shape[-2]], scores.mask)


def _cuda_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scores: Scores):
    heads = key.shape[1]
    wide_key, wide_value = _per_query(query, key, value)
    bias = _bias(scores.mask, query, key)
    padded = lse.new_full((*lse.shape[:-1], -(-lse.shape[-1] // 32) * 32), inf)  # the kernel's own extent
    padded[..., : lse.shape[-1]] = lse
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of dropout, of which there is none
    grad_query, grad_key, grad_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, query, wide_key, wide_value, bias, out, padded, seed, seed, 0.0, [True, True, True, False],
        scores.triangle, scale=scores.scale,
    )  # fmt: skip
    return grad_query, _summed(grad_key, heads), _summed(grad_value, heads), None


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as what is added, as torch makes it for its kernels."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -inf)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask for every head, its rows at multiples of 16 bytes, as the kernel wants it."""
    if mask is None:
        return None
    mask = _additive(mask, query.dtype)
    columns = key.shape[-2]
    padded = mask.new_empty((*mask.shape[:-1], -(-columns // 16) * 16))
    padded[..., :columns] = mask
    return padded[..., :columns].expand(*query.shape[:-1], columns)


def _marked(lse: Tensor, mask: Tensor | None) -> Tensor:
    """-inf for rows that the mask lets see nothing: kernels say 0 there, or nothing that means anything."""
    if mask is None:
        return lse
    seen = mask if mask.dtype == torch.bool else mask > -inf
    return lse.masked_fill(seen.any(-1).logical_not(), -inf)


def _per_query(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as queries."""
    groups = query.shape[-3] // key.shape[-3] if query.ndim > 2 and key.shape[-3] else 1
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """The gradient of repeated heads, as that of the heads themselves."""
    if grad.ndim < 3 or grad.shape[-3] == heads:
        return grad
    return grad.unflatten(-3, (heads, -1)).sum(-3)


CPU, CUDA = Kernel(_cpu_forward, _cpu_backward), Kernel(_cuda_forward, _cuda_backward)


# --- written out -------------------------------------------------------------------


def _scores(query: Tensor, key: Tensor, scores: Scores) -> Tensor:
    root = sqrt(abs(scores.scale))  # on both, as torch: products of halves stay in range
    out = (query * (root if scores.scale > 0 else -root)) @ (key * root).mT
    if scores.mask is not None and scores.mask.dtype == torch.bool:
        out = out.masked_fill(scores.mask.logical_not(), -inf)
    elif scores.mask is not None:
        out = out + scores.mask
    if scores.triangle:
        hidden = torch.ones(out.shape[-2:], dtype=torch.bool, device=out.device).triu(1)
        out = out.masked_fill(hidden, -inf)
    return out


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.float() if tensor.dtype in _HALVES else tensor for tensor in tensors)


def _written_forward(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    dtype = query.dtype
    query, key, value = _wide(query, *_per_query(query, key, value))
    logits = _scores(query, key, scores)
    lse = torch.logsumexp(logits, -1)
    weights = _weights(logits, lse)
    if scores.noise is not None:
        weights = weights * scores.noise
    return (weights @ value).to(dtype), lse


def _written_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scores: Scores
):  # fmt: skip
    heads, dtype = key.shape[-3] if key.ndim > 2 else 1, query.dtype
    grad, query, key, value, out = _wide(grad, query, *_per_query(query, key, value), out)
    weights = _weights(_scores(query, key, scores), lse)
    dropped = weights if scores.noise is None else weights * scores.noise
    grad_weights = grad @ value.mT
    if scores.noise is not None:
        grad_weights = grad_weights * scores.noise
    grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True))
    grad_query, grad_key = grad_scores @ key * scores.scale, grad_scores.mT @ query * scores.scale
    grad_value = dropped.mT @ grad
    found = (grad_query, _summed(grad_key, heads), _summed(grad_value, heads))
    grad_mask = grad_scores.sum_to_size(scores.mask.shape) if scores.needs_mask else None
    return *(each.to(dtype) for each in found), grad_mask


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse); zeros in rows that see nothing."""
    return torch.exp(logits - lse.masked_fill(lse == -inf, 0.0).unsqueeze(-1))


WRITTEN = Kernel(_written_forward, _written_backward)
