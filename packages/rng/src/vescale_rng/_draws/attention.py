"""Dropout inside scaled_dot_product_attention, drawn for the shard: as one CPU device draws it, and on others alike.

With dropout_p > 0 a CPU takes the math path (its flash kernel has no dropout: ATen/native/transformers/
sdp_utils_cpp.cpp, check_for_dropout), which drops entries of the weights after softmax:
at::dropout(weights, dropout_p), over the contiguous [..., heads, rows, columns] of all query heads
(ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math; causal and masked entries take their
numbers, too). So the noise is a dropout noise of that shape, cut like the result: by batch, heads and rows. How the
operands lie is decided by vescale_dtensor's rule for attention without dropout; its kernel is this module's.

An accelerator's fused kernels draw numbers of their own within a tile, which nobody else can make. So there, too, the
math path is taken, with noise that the mesh does not change: of the philox stream where it is on, else of the device's
generator (on CUDA that of the dropout kernel, which the math path of one device runs, in a closed form; elsewhere drawn
whole and cut). Nothing is gathered. That a fused kernel of one device would have drawn others is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor import Layout, register_rule
from vescale_dtensor.engine import TABLE, attention, layout_of
from vescale_dtensor.rules import Call, Decision

from .._cpu.stream import Draw, fill
from .._cuda.numbers import fused_dropout_
from .._deferred.materialize import cut
from .._select import current_stream
from .._torch_private import _safe_softmax
from .dropout import drawn_noise

_without_dropout = TABLE[F.scaled_dot_product_attention].rule
_POSITION = 4  # of dropout_p
_log = logging.getLogger("vescale")


@register_rule(F.scaled_dot_product_attention, exact=True)
def scaled_dot_product_attention(call: Call):
    """The rule of vescale_dtensor; with dropout, its layouts."""
    p = call.get(_POSITION, "dropout_p", 0.0)
    if not p:
        return _without_dropout(call)
    kwargs = {name: value for name, value in call.kwargs.items() if name != "dropout_p"}
    args = (*call.args[:_POSITION], 0.0, *call.args[_POSITION + 1 :]) if len(call.args) > _POSITION else call.args
    decision = attention(replace(call, args=args, kwargs=kwargs), attend)
    if decision is None:
        return None
    key = call.get(1, "key")
    shape = (*decision.out.shape[:-1], key.shape[-2])
    weights = layout_of(call.mesh, decision.out.states, shape).reduced
    return replace(decision, run=_dropping(decision, weights, p))


def _dropping(decision: Decision, weights: Layout, p: float) -> Callable:
    """`decision.run` with this rank's noise in the place of the probability; drawn where no rows lie, too."""
    kernel = decision.run or attend

    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask=None, dropout_p=0.0, *args, **kwargs) -> Tensor:
        dtype = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
        noise = query.new_empty(weights.local_shape, dtype=dtype)
        with torch.no_grad():
            noise = noise.zero_() if p == 1 else _noise(noise, weights, p).div_(1 - p)
        return kernel(query, key, value, attn_mask, noise, *args, **kwargs)

    return run


def _noise(local: Tensor, weights: Layout, p: float) -> Tensor:
    """This rank's part of the zeros and ones of the weights; `local` may be overwritten."""
    device = local.device.type
    if device in ("cpu", "meta") or current_stream() == "philox":
        return drawn_noise(local, weights, p)
    _say_once(device)
    if device == "cuda":
        return fill(local, weights, Draw(fused_dropout_, (p,)), fresh=True)
    return cut(local.new_empty(weights.shape).bernoulli_(1 - p), weights)


@lru_cache(maxsize=8)
def _say_once(device: str) -> None:
    _log.warning(
        "attention dropout on %s is that of torch's math path, the same on every mesh; a fused kernel of one device "
        'draws another mask. With vescale.use_rng_stream("philox") it is the same on every kind of device, too',
        device,
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, noise: Tensor, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's math path with the noise given; step by step as there, so that the values are its own."""
    dtype = query.dtype
    if is_causal and attn_mask is not None:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
    query, key, value = (tensor.to(noise.dtype) for tensor in (query, key, value))
    if enable_gqa:
        ratio = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(ratio, -3), value.repeat_interleave(ratio, -3)
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    root = sqrt(abs(scale))
    scores = (query * (-root if scale < 0 else root)) @ (key * root).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
        scores = scores + attn_mask
    weights = _safe_softmax(scores, -1) * noise[..., : scores.shape[-1]]
    return (weights @ value).to(dtype)
