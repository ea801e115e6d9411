"""What fused kernels of published systems keep for backward, in models of transformers without values.

torch writes a norm, a gate and a loss out where there is no kernel, and so for meta tensors; each operator then keeps
its own. A system's kernel keeps what it is given: of a norm its input, of a gate both factors, of a loss the scores, in
whose place it makes their gradient.
"""

from __future__ import annotations

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


class Norm(nn.Module):
    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty_like(weight)), eps

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight, self.eps)


class Gated(nn.Module):
    """The feed-forward part of a Llama."""

    def __init__(self, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_Gate.apply(self.gate_proj(x), self.up_proj(x)))


def loss(logits: Tensor, labels: Tensor, **more: Any) -> Tensor:
    return _Loss.apply(logits)


def with_norms(model):
    return _replaced(model, lambda one: type(one).__name__.endswith("RMSNorm"), _norm)


def with_gates(model):
    return _replaced(model, lambda one: type(one).__name__ == "LlamaMLP", _gated)


def with_loss(model):
    model.loss_function = loss
    return model


def _norm(one) -> Norm:
    return Norm(one.weight, one.variance_epsilon)


def _gated(one) -> Gated:
    return Gated(one.gate_proj, one.up_proj, one.down_proj)


def _replaced(model, wanted, made):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if wanted(child):
                setattr(module, name, made(child))
    return model
