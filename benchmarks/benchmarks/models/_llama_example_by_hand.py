"""The example Llama as an expert splits it by hand for one rank: Megatron-style tensor and sequence parallel.

HuggingFace's modules hold local weights, and their own code runs on local tensors; what Megatron adds is explicit: the
collectives around attention and MLP, a vocabulary-parallel embedding and loss, and one sum of the norms' gradients
after backward. What HuggingFace's outer forward does in Python (masks, outputs) is in this variant as in every other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup, ReduceOp, group
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from benchmarks.cases._group_methods import direct

_all_gather = direct(ProcessGroup, "_allgather_base")
_all_to_all = direct(ProcessGroup, "alltoall_base")
_all_reduce = direct(ProcessGroup, "allreduce")

SHARD_DIM = {
    "embed_tokens": 0, "lm_head": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1,
    "down_proj": 1,
}  # fmt: skip


def all_gather_tokens(x, ranks):
    """[batch, tokens / ranks, hidden] -> [batch, tokens, hidden]"""
    batch, tokens, hidden = x.shape
    out = x.new_empty((ranks * batch, tokens, hidden))
    _all_gather(group.WORLD, out, x.contiguous()).wait()
    return out.view(ranks, batch, tokens, hidden).transpose(0, 1).reshape(batch, ranks * tokens, hidden)


def reduce_scatter_tokens(x, ranks):
    """[batch, tokens, hidden], a summand -> [batch, tokens / ranks, hidden], summed

    As an all-to-all and a local sum: on gloo cheaper than its own reduce-scatter.
    """
    batch, tokens, hidden = x.shape
    parts = x.view(batch, ranks, tokens // ranks, hidden).transpose(0, 1).contiguous()
    out = torch.empty_like(parts)
    _all_to_all(group.WORLD, out, parts, [], []).wait()
    return out.sum(0) if ranks > 2 else out[0] + out[1]


class GatherTokens(torch.autograd.Function):
    """Before a column-parallel layer."""

    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return all_gather_tokens(x, ranks)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter_tokens(gradient, ctx.ranks), None


class ScatterTokens(torch.autograd.Function):
    """After a row-parallel layer."""

    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return reduce_scatter_tokens(x, ranks)

    @staticmethod
    def backward(ctx, gradient):
        return all_gather_tokens(gradient, ctx.ranks), None


class VocabularyLoss(torch.autograd.Function):
    """The mean cross entropy of logits [positions, words / ranks]; a target of -100 counts nothing.

    Megatron's (`vocab_parallel_cross_entropy`), its two sums in one collective.
    """

    @staticmethod
    def forward(ctx, logits, targets, rank):
        words = logits.shape[1]
        highest = logits.amax(-1)
        _all_reduce(group.WORLD, [highest], ReduceOp.MAX).wait()
        mine = targets - rank * words
        absent = (mine < 0) | (mine >= words)
        mine = mine.masked_fill(absent, 0)
        shifted = logits - highest.unsqueeze(1)
        chosen = shifted.gather(1, mine.unsqueeze(1)).squeeze(1).masked_fill(absent, 0.0)
        powers = shifted.exp_()
        sums = torch.stack((chosen, powers.sum(-1)))
        _all_reduce(group.WORLD, [sums]).wait()
        counts = targets != -100
        number = counts.sum()
        losses = (sums[1].log() - sums[0]).masked_fill(~counts, 0.0)
        ctx.save_for_backward(powers, sums[1], mine, absent, counts, number)
        return losses.sum() / number

    @staticmethod
    def backward(ctx, gradient):
        powers, total, mine, absent, counts, number = ctx.saved_tensors
        found = powers / total.unsqueeze(1)
        found.scatter_add_(1, mine.unsqueeze(1), (absent.to(found.dtype) - 1.0).unsqueeze(1))
        return found * (counts * (gradient / number)).unsqueeze(1), None, None


class Attention(LlamaAttention):
    def forward(self, hidden_states, **kwargs):
        out, weights = super().forward(GatherTokens.apply(hidden_states, self.ranks), **kwargs)
        return ScatterTokens.apply(out, self.ranks), weights


class MLP(LlamaMLP):
    def forward(self, x):
        return ScatterTokens.apply(super().forward(GatherTokens.apply(x, self.ranks)), self.ranks)


class Embedding(nn.Embedding):
    def forward(self, words):
        count = self.weight.shape[0]
        mine = words - self.rank * count
        absent = (mine < 0) | (mine >= count)
        out = F.embedding(mine.masked_fill(absent, 0), self.weight)
        return ScatterTokens.apply(out.masked_fill(absent.unsqueeze(-1), 0.0), self.ranks)


class Head(nn.Linear):
    def forward(self, x):
        return super().forward(GatherTokens.apply(x, self.ranks))


OURS = {LlamaAttention: Attention, LlamaMLP: MLP, nn.Embedding: Embedding}


def split_by_hand(model: nn.Module, rank: int, ranks: int) -> nn.Module:
    """`model`, an example Llama, for one rank, in place."""
    for name, module in model.named_modules():
        module.__class__ = Head if name == "lm_head" else OURS.get(type(module), type(module))
        module.rank, module.ranks = rank, ranks
        dim = SHARD_DIM.get(name.rpartition(".")[2])
        if dim is not None:
            module.weight = nn.Parameter(module.weight.detach().chunk(ranks, dim)[rank].clone())

    def loss(logits, labels, vocab_size, **_):
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        return VocabularyLoss.apply(logits.float().view(-1, logits.shape[-1]), shifted, rank)

    model.loss_function = loss
    return model


def sum_norm_gradients(model: nn.Module) -> None:
    """Over ranks: a norm saw the tokens of its rank only."""
    gradients = [p.grad for p in model.parameters() if p.ndim == 1]
    flat = torch.cat(gradients)
    _all_reduce(group.WORLD, [flat]).wait()
    at = 0
    for gradient in gradients:
        gradient.copy_(flat[at : at + gradient.numel()])
        at += gradient.numel()
