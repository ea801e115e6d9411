"""Llama blocks as ordinary single-device modules, written as HuggingFace writes them.

This is the user's code: global sizes, shapes taken from tensors, nothing about ranks. veScale and
torch's DTensor parallelise exactly these modules; `_llama_by_hand` is the same mathematics written
for one rank. Parameters carry the same names in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Sizes:
    """So small that the kernels cost next to nothing and the host's work is what is timed."""

    batch: int = 2
    tokens: int = 16
    hidden: int = 64
    heads: int = 8
    intermediate: int = 128
    layers: int = 4

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


# The dim on which tensor parallelism shards a weight; a module not named here is replicated.
SHARD_DIM = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "gate_proj": 0,
    "up_proj": 0,
    "o_proj": 1,
    "down_proj": 1,
}


def shard_dim(parameter_name: str) -> int | None:
    """`layers.0.mlp.up_proj.weight` -> 0."""
    return SHARD_DIM.get(parameter_name.split(".")[-2])


def rotary_table(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [tokens, head_dim]: the model computes them once, outside the blocks."""
    even = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32)
    angle = torch.outer(torch.arange(sizes.tokens), 10000.0 ** (-even / sizes.head_dim))
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate(q, k, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class RMSNorm(nn.Module):
    """Four operators, as in HuggingFace, in every variant: not the fused one.

    Without HuggingFace's casts to float32 and back, which do nothing here.
    """

    def __init__(self, hidden: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


class Attention(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.o_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x, cos, sin):
        shape = x.shape[:-1]
        per_head = (*shape, -1, self.head_dim)
        q = self.q_proj(x).view(per_head).transpose(1, 2)
        k = self.k_proj(x).view(per_head).transpose(1, 2)
        v = self.v_proj(x).view(per_head).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(*shape, -1))


class MLP(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden)
        self.mlp = MLP(sizes)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Blocks(nn.Module):
    """The stack. In: [batch, tokens, hidden] and the rotary table; out: as in."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))

    def forward(self, x, cos, sin):
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def blocks(sizes: Sizes) -> Blocks:
    """Always the same weights, norms included (all ones would hide a norm that is left out)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Blocks(sizes)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def activations(sizes: Sizes) -> torch.Tensor:
    """The input of the first block, [batch, tokens, hidden]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sizes.batch, sizes.tokens, sizes.hidden, generator=generator)
