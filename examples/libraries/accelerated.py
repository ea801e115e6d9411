"""A loop of accelerate's on one device. `accelerated_parallel.py` is the same on two."""

import torch
from accelerate import Accelerator
from libraries.data import rows
from llama.model import build
from torch.utils.data import DataLoader


def train(folder: str, steps: int = 10) -> list[float]:
    """The loss of every batch."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(8 * steps), batch_size=8))
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(folder)
    return losses


if __name__ == "__main__":
    print(train("outputs/accelerated"))
