"""A loop of Lightning's Fabric on two devices; `fabric.py` is the same on one."""

import torch
from libraries.data import rows
from lightning.fabric import Fabric
from llama.model import build
from torch.utils.data import DataLoader

import vescale


def train(folder: str, steps: int = 10) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    vescale.parallelize(vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3), model, optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for batch in DataLoader(rows(8 * steps), batch_size=8):
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train("outputs/fabric"))
