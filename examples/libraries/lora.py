"""LoRA by PEFT on one device. `lora_parallel.py` is the same on two."""

import torch
from libraries.data import rows
from llama.model import build
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader


def train(folder: str, steps: int = 10) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    model = get_peft_model(build(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    losses = []
    for batch in DataLoader(rows(8 * steps), batch_size=8):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train("outputs/lora"))
