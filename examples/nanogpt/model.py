"""A GPT as ordinary single-device PyTorch, in the manner of nanoGPT.

Nothing here knows of ranks, meshes or shards. The constructs that are awkward to
shard are here on purpose, as users write them: one merged projection for query, key
and value, ``split(n_embd, dim=2)`` of its output, ``view(B, T, n_head, C // n_head)``
with the model's own head count, and an output layer tied to the token embedding.

Shapes in comments: B batch, T positions, C = n_embd channels, V = vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. The defaults train on bytes, on a laptop, in seconds.

    Arguments:
        vocab_size: number of tokens; 256 for bytes.
        block_size: longest sequence, the number of learned positions.
        n_layer, n_head, n_embd: blocks, attention heads, channels; ``n_head`` divides
            ``n_embd``.
        dropout: probability for attention, residual branches and embeddings.
        bias: whether linear layers and layer norms have one.
    """

    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head}): "
                f"each head takes n_embd / n_head channels; "
                f"{self.n_embd - self.n_embd % self.n_head} would do"
            )


class CausalSelfAttention(nn.Module):
    """Multi-head attention of every position to itself and those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # B, n_head, T, C / n_head
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Attention, then MLP, each on a normalised input and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and tied embeddings.

    Example:
        >>> model = GPT(GPTConfig(n_layer=2))
        >>> tokens = torch.randint(256, (2, 9))
        >>> model(tokens[:, :-1], tokens[:, 1:]).shape      # a loss
        torch.Size([])
        >>> model(tokens[:, :-1]).shape                     # logits
        torch.Size([2, 8, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.apply(self._init_weights)
        # Every block adds two branches to the residual stream; scaled like this, its
        # variance at the start does not grow with depth (GPT-2, section 2.3).
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * config.n_layer) ** 0.5)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean cross-entropy (0-dim) when `targets` are given, else logits (B, T, V).

        Arguments:
            idx: int64 (B, T), tokens; T is at most ``block_size``.
            targets: int64 (B, T), the token that follows each of `idx`.
        """
        T = idx.size(1)
        if self.config.block_size < T:
            raise ValueError(
                f"a sequence of {T} tokens is longer than block_size ({self.config.block_size}), "
                f"the number of learned positions: build the model with block_size={T}"
            )
        positions = torch.arange(T, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
