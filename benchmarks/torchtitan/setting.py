"""What both sides run: sizes, seed, data, layouts. Imports torch alone, so that either environment can read it.

The model is TorchTitan's `debugmodel` of Llama 3 (6.2 million parameters). A sample of the data is a function of its
place in the stream, so that every layout with the same global batch sees the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY, WIDTH, LAYERS, HEADS, INNER = 2048, 256, 6, 16, 768
ROPE_BASE = 500_000.0
SEED, CLIP = 42, 1.0
LEARNING_RATE, BETAS, DECAY = 8e-4, (0.9, 0.95), 0.1  # of AdamW, fused: TorchTitan's own choice
MICROBATCHES = 4


@dataclass(frozen=True)
class Layout:
    """A mesh, and what a step of it is fed."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: bool = False
    batch: int = 4
    sequence: int = 64
    fake: bool = False

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp


# On a fake group collectives return at once and 16 tokens cost no arithmetic: what is left is the host's own work.
LAYOUTS = {
    "TP 8": Layout(tp=8, batch=1, sequence=16, fake=True),
    "ZeRO-3 2 x TP 8": Layout(dp=2, tp=8, zero=True, batch=2, sequence=16, fake=True),
    "one device": Layout(),
    "FSDP 2": Layout(dp=2, zero=True),
    "TP 2": Layout(tp=2),
    "PP 2": Layout(pp=2),
    "FSDP 2 x TP 2": Layout(dp=2, tp=2, zero=True),
}


def samples(first: int, count: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Samples `first` and the following: inputs and targets, int64 (count, sequence)."""
    rows = [
        torch.randint(VOCABULARY, (sequence + 1,), generator=torch.Generator().manual_seed(1234 + place))
        for place in range(first, first + count)
    ]
    tokens = torch.stack(rows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
