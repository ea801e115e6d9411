"""The Llama of the comparison, as ordinary single-device PyTorch: nothing here knows of ranks, meshes or shards.

The same function as TorchTitan's `debugmodel`: query, key and value in one projection, head by head, rotary embedding
of adjacent pairs as complex numbers, SwiGLU. `build` draws the parameters in TorchTitan's order and from its
distributions, so that both sides begin with the same numbers on one device.

Shapes in comments: B batch, T positions, N heads, H width of a head.
"""

from __future__ import annotations

import math

import torch
from setting import HEADS, INNER, LAYERS, ROPE_BASE, VOCABULARY, WIDTH
from torch import Tensor, nn
from torch.nn import functional as F

HEAD = WIDTH // HEADS


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.wqkv = nn.Linear(width, 3 * heads * HEAD, bias=False)
        self.wo = nn.Linear(heads * HEAD, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (-1, 3, HEAD)).unbind(-2)  # B, T, N, H each
        q, k = (rotate(each, turns).transpose(1, 2) for each in (q, k))
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.feed_forward = FeedForward(width, inner)
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, inner: int, positions: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("turns", rotary_table(positions, HEAD), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy, of tokens and targets int64 (B, T)."""
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, self.turns)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets.flatten())


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """x (B, T, N, H), its adjacent pairs turned by `turns`, complex (T, 1, H / 2)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(3)


def rotary_table(positions: int, width: int) -> Tensor:
    """Complex (positions, 1, width / 2), with Llama 3.1's stretching of low frequencies (its reference code's factors:
    8, from a quarter of 8192 positions on, not below it)."""
    speeds = 1.0 / ROPE_BASE ** (torch.arange(0, width, 2).float() / width)
    lengths = 2 * math.pi / speeds
    share = (8192 / lengths - 1) / (4 - 1)
    between = (1 - share) * speeds / 8 + share * speeds
    stretched = torch.where(lengths > 8192, speeds / 8, torch.where(lengths < 8192 / 4, speeds, between))
    angles = torch.outer(torch.arange(positions), stretched)
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def build(positions: int, share: int = 1) -> Llama:
    """The model, from torch's generator as it stands; `share` 8: an eighth of heads, inner width and vocabulary."""
    with torch.device("meta"):
        model = Llama(VOCABULARY // share, WIDTH, LAYERS, HEADS // share, INNER // share, positions)
    model.to_empty(device="cpu")
    model.turns = rotary_table(positions, HEAD)
    with torch.no_grad():
        fill(model)
    return model


def fill(model: Llama) -> None:
    """Draws every parameter; wq, wk and wv are drawn apart and laid together head by head."""
    nn.init.normal_(model.tok_embeddings.weight)
    for depth, block in enumerate(model.layers):
        deep = 0.02 / math.sqrt(2 * (depth + 1))
        merged = block.attention.wqkv.weight
        parts = [nn.init.trunc_normal_(torch.empty(len(merged) // 3, WIDTH), std=0.02) for _ in "qkv"]
        heads = torch.stack([part.unflatten(0, (-1, HEAD)) for part in parts], dim=1)
        merged.copy_(heads.flatten(0, 2))
        nn.init.trunc_normal_(block.attention.wo.weight, std=deep)
        nn.init.trunc_normal_(block.feed_forward.w1.weight, std=0.02)
        nn.init.trunc_normal_(block.feed_forward.w2.weight, std=deep)
        nn.init.trunc_normal_(block.feed_forward.w3.weight, std=deep)
        nn.init.ones_(block.attention_norm.weight)
        nn.init.ones_(block.ffn_norm.weight)
    nn.init.ones_(model.norm.weight)
    std = WIDTH**-0.5
    nn.init.trunc_normal_(model.lm_head.weight, std=std, a=-3 * std, b=3 * std)
