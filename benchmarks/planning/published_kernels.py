"""What fused kernels of published systems keep for backward, in models of transformers without values.

torch writes a norm, a gate and a loss out where there is no kernel, and so for meta tensors; each operator then keeps
its own. A system's kernel keeps what it is given: of a norm its input, of a gate both factors, of a loss the scores, in
whose place it makes their gradient. Megatron weighs rows before experts' second product, in the gate's kernel, so that
nobody keeps what that gives (here they are weighed after it, and it is not kept either). Under `again` what a norm
gives, or that kernel, is let go and computed again ("layernorm", "moe_act"): in memory a norm's result is its input.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


class _NormAgain(_Norm):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        made = _Norm.forward(ctx, x, weight, eps)
        return x.view_as(x) if x.is_meta else made


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.scores = scores.detach()
        return scores.new_zeros((), dtype=torch.float32) + scores.narrow(-1, 0, 1).float().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.scores


class _Whole(torch.autograd.Function):
    """A gate of one tensor, both factors of it."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(*ctx.saved_tensors)


class _WholeAgain(torch.autograd.Function):
    """The same with the product after it."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, down: Tensor, ends: Tensor) -> Tensor:
        from transformers.integrations.moe import _grouped_linear

        ctx.save_for_backward(both, down)
        gate, up = both.chunk(2, -1)
        return _grouped_linear(nn.functional.silu(gate) * up, down, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return *map(torch.empty_like, ctx.saved_tensors), None


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return rows * weights[:, None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return torch.empty_like(grad), torch.empty_like(*ctx.saved_tensors)


def _experts(again: bool, self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts' rows, sorted by expert: [T, H] -> [T, H]."""
    from transformers.integrations.moe import _grouped_linear

    chosen = index.shape[-1]
    of, order = torch.sort(index.reshape(-1))
    ends = torch.histc(of.float(), bins=self.num_experts, min=0, max=self.num_experts - 1).cumsum(0, dtype=torch.int32)
    both = _grouped_linear(x[order // chosen], self.gate_up_proj, ends)
    if again:
        out = _WholeAgain.apply(both, self.down_proj, ends)
    else:
        out = _grouped_linear(_Whole.apply(both), self.down_proj, ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    out = _Weighed.apply(out, weights.reshape(-1)[order].to(x.dtype))[back]
    return out.view(-1, chosen, out.shape[-1]).sum(1)


class Norm(nn.Module):
    def __init__(self, weight: Tensor, eps: float, again: bool = False) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty_like(weight)), eps
        self.kernel = _NormAgain if again else _Norm

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel.apply(x, self.weight, self.eps)


class Gated(nn.Module):
    """The feed-forward part of a Llama."""

    def __init__(self, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_Gate.apply(self.gate_proj(x), self.up_proj(x)))


def loss(logits: Tensor, labels: Tensor, *more: Any, **named: Any) -> Tensor:
    return _Loss.apply(logits)


def with_norms(model, again: bool = False):
    """`again`: of those of a block, not of those in its attention."""
    return _replaced(model, lambda one: type(one).__name__.endswith("RMSNorm"), partial(_norm, again))


def with_gates(model):
    return _replaced(model, lambda one: type(one).__name__ == "LlamaMLP", _gated)


def with_experts(model, again: bool):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = f"published{again:d}"
    ALL_EXPERTS_FUNCTIONS.register(name, partial(_experts, again))
    model.config._experts_implementation = name
    return model


def attention(module, query: Tensor, key: Tensor, value: Tensor, mask, scaling=None, **more: Any):
    """Fused, causal, with shared keys as they are: [B, N, S, D] -> [B, S, N, D]."""
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def with_attention(model):
    from transformers import AttentionInterface

    AttentionInterface.register("published", attention)
    model.config._attn_implementation = "published"
    return model


def with_loss(model):
    model.loss_function = loss
    return model


def _norm(again: bool, name: str, one) -> Norm:
    return Norm(one.weight, one.variance_epsilon, again and name.endswith("_layernorm"))


def _gated(_: str, one) -> Gated:
    return Gated(one.gate_proj, one.up_proj, one.down_proj)


def _replaced(model, wanted, made):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if wanted(child):
                setattr(module, name, made(name, child))
    return model
