"""Trains a Llama on long stretches of one text, on four devices. `train.py` is the same on one: compare the two."""

import torch
from corpus import VOCABULARY, read_corpus
from llama.model import build

from vescale import Plan, parallelize


def train(steps: int = 10, length: int = 2048, ranks: int = 4, context: str = "ring") -> list[float]:
    """The loss of every step. Each rank reads its own places of a stretch, and never holds a whole one."""
    torch.manual_seed(0)
    text = read_corpus(None, seed=0, device=torch.device("cpu")).tokens
    model = build(vocab_size=VOCABULARY, max_position_embeddings=length)
    plan = Plan(mesh={"cp": ranks}, parameters={"*": {}}, context_axis="cp", context=context)
    model, optimizer = parallelize(plan, model, lambda parameters: torch.optim.AdamW(parameters, lr=5e-4))
    mine = plan.local_sequence(length)
    losses = []
    for step in range(steps):
        part = text[step * length + mine.start : step * length + mine.stop].long().unsqueeze(0)
        words = plan.local_batch(part, whole_sequences=False)
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train())
