"""TRL's SFTTrainer on one device. `sft_parallel.py` is the same on two."""

import torch
from datasets import Dataset
from libraries.data import rows
from llama.model import build
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def train(folder: str, steps: int = 10) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    arguments = SFTConfig(
        folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=5e-4, logging_steps=1, report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({f"b{at}": at for at in range(256)}, unk_token="b0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="b0", eos_token="b1")
    data = Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in rows()]})
    trainer = SFTTrainer(build(), arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    print(train("outputs/sft"))
