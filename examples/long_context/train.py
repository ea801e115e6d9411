"""Trains a Llama on long stretches of one text, on one device. `train_parallel.py` is the same on four."""

import torch
from corpus import VOCABULARY, read_corpus
from llama.model import build


def train(steps: int = 10, length: int = 2048) -> list[float]:
    """The loss of every step, each of `length` bytes of the standard library, one stretch after the other."""
    torch.manual_seed(0)
    text = read_corpus(None, seed=0, device=torch.device("cpu")).tokens
    model = build(vocab_size=VOCABULARY, max_position_embeddings=length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    losses = []
    for step in range(steps):
        words = text[step * length : (step + 1) * length].long().unsqueeze(0)
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train())
