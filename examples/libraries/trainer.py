"""transformers' Trainer on one device. `trainer_parallel.py` is the same on two."""

import torch
from libraries.data import rows
from llama.model import build
from transformers import Trainer, TrainingArguments


def train(folder: str, steps: int = 10) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=5e-4, logging_steps=1, report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, save_steps=steps,
    )  # fmt: skip
    trainer = Trainer(build(), arguments, train_dataset=rows())
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    print(train("outputs/trainer"))
