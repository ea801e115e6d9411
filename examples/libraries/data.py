"""Rows of the standard library's text, as the scripts of this folder read them."""

import torch
from corpus import read_corpus


def rows(count: int = 64, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """`count` samples of `length` bytes; transformers shifts labels itself."""
    tokens, _ = read_corpus(None, seed=0, device=torch.device("cpu")).batch(0, count, length)
    return [{"input_ids": row, "labels": row} for row in tokens]
