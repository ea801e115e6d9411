"""The same blocks as an expert writes them for one rank: Megatron-style tensor and sequence parallel.

Local sizes are in the code, and the four collectives a block needs each way are explicit
`autograd.Function`s over the process group's own methods, the cheapest way into a collective.
Nothing is left in that such code would not have: no shape is looked up, no type is checked.
The layout stays [batch, tokens, hidden] as in the other variants, so a collective along tokens
reorders once (Megatron itself keeps tokens first and saves that copy). A replicated norm weight
gets the gradient of this rank's tokens only; as in Megatron its sum over ranks belongs to gradient
synchronisation, after backward, and is in no variant's time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.cases._group_methods import direct
from benchmarks.models._llama_blocks import RMSNorm, Sizes, rotate, shard_dim


def all_gather_tokens(x, group, ranks):
    """[batch, tokens / ranks, hidden] -> [batch, tokens, hidden]"""
    batch, tokens, hidden = x.shape
    out = x.new_empty((ranks * batch, tokens, hidden))
    direct(type(group), "_allgather_base")(group, out, x.contiguous()).wait()
    by_rank = out.view(ranks, batch, tokens, hidden).transpose(0, 1)
    return by_rank.reshape(batch, ranks * tokens, hidden)


def reduce_scatter_tokens(x, group, ranks):
    """[batch, tokens, hidden], a summand -> [batch, tokens / ranks, hidden], summed"""
    batch, tokens, hidden = x.shape
    local = tokens // ranks
    by_rank = x.view(batch, ranks, local, hidden).transpose(0, 1)
    summand = by_rank.reshape(ranks * batch, local, hidden)
    out = x.new_empty((batch, local, hidden))
    direct(type(group), "_reduce_scatter_base")(group, out, summand).wait()
    return out


class GatherTokens(torch.autograd.Function):
    """Before a column-parallel layer."""

    @staticmethod
    def forward(ctx, x, group, ranks):
        ctx.group, ctx.ranks = group, ranks
        return all_gather_tokens(x, group, ranks)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter_tokens(gradient, ctx.group, ctx.ranks), None, None


class ScatterTokens(torch.autograd.Function):
    """After a row-parallel layer."""

    @staticmethod
    def forward(ctx, x, group, ranks):
        ctx.group, ctx.ranks = group, ranks
        return reduce_scatter_tokens(x, group, ranks)

    @staticmethod
    def backward(ctx, gradient):
        return all_gather_tokens(gradient, ctx.group, ctx.ranks), None, None


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, ranks: int):
        super().__init__()
        local = sizes.hidden // ranks
        self.per_head = (sizes.batch, sizes.tokens, sizes.heads // ranks, sizes.head_dim)
        self.merged = (sizes.batch, sizes.tokens, local)
        self.q_proj = nn.Linear(sizes.hidden, local, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, local, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, local, bias=False)
        self.o_proj = nn.Linear(local, sizes.hidden, bias=False)

    def forward(self, x, cos, sin):
        q = self.q_proj(x).view(self.per_head).transpose(1, 2)
        k = self.k_proj(x).view(self.per_head).transpose(1, 2)
        v = self.v_proj(x).view(self.per_head).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(self.merged))


class MLP(nn.Module):
    def __init__(self, sizes: Sizes, ranks: int):
        super().__init__()
        local = sizes.intermediate // ranks
        self.gate_proj = nn.Linear(sizes.hidden, local, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, local, bias=False)
        self.down_proj = nn.Linear(local, sizes.hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, group, ranks: int):
        super().__init__()
        self.group, self.ranks = group, ranks
        self.input_layernorm = RMSNorm(sizes.hidden)
        self.self_attn = Attention(sizes, ranks)
        self.post_attention_layernorm = RMSNorm(sizes.hidden)
        self.mlp = MLP(sizes, ranks)

    def forward(self, x, cos, sin):
        whole = GatherTokens.apply(self.input_layernorm(x), self.group, self.ranks)
        x = x + ScatterTokens.apply(self.self_attn(whole, cos, sin), self.group, self.ranks)
        whole = GatherTokens.apply(self.post_attention_layernorm(x), self.group, self.ranks)
        return x + ScatterTokens.apply(self.mlp(whole), self.group, self.ranks)


class Blocks(nn.Module):
    """The stack. In and out: this rank's tokens, [batch, tokens / ranks, hidden]."""

    def __init__(self, sizes: Sizes, group, ranks: int):
        super().__init__()
        self.layers = nn.ModuleList(Block(sizes, group, ranks) for _ in range(sizes.layers))

    def forward(self, x, cos, sin):
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def blocks_by_hand(whole: nn.Module, sizes: Sizes, group, rank: int, ranks: int) -> Blocks:
    """This rank's part of `whole`, the single-device blocks."""
    model = Blocks(sizes, group, ranks)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full, dim = whole.get_parameter(name), shard_dim(name)
            parameter.copy_(full if dim is None else full.chunk(ranks, dim)[rank])
    return model
