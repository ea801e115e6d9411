"""Trains the model of this folder on one device. `train_parallel.py` is the same on many: compare the two."""

import torch
from corpus import VOCABULARY, read_corpus
from mixtral.model import build


def train(steps: int = 20) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    corpus = read_corpus(None, seed=0, device=torch.device("cpu"))
    model = build(vocab_size=VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    losses = []
    for step in range(steps):
        inputs, _ = corpus.batch(step, 8, 32)
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train())
