"""Trains the model of this folder on many devices. `train.py` is the same on one: compare the two."""

import torch
from corpus import VOCABULARY, read_corpus
from nanogpt.model import GPT, GPTConfig

from vescale import Boundary, InterleavedShard, Plan, Replicate, Shard, parallelize


def train(steps: int = 20) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    corpus = read_corpus(None, seed=0, device=torch.device("cpu"))
    model = GPT(GPTConfig(vocab_size=VOCABULARY, block_size=32))
    rows, columns, whole = {"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Replicate()}
    sharded = Boundary(input=whole, output={"tp": Shard(1)})  # between blocks every rank holds a part of the sequence
    layers = {"*.c_attn.*": {"tp": InterleavedShard(0, 3)}, "*.c_fc.*": rows, "*.c_proj.weight": columns}
    plan = Plan(
        mesh={"dp": 2, "tp": 2},
        parameters={**layers, "*.wte.*": rows, "lm_head.*": rows, "*": {}},
        boundaries={"*.attn": sharded, "*.mlp": sharded, "lm_head": Boundary(input=whole)},
        checkpointing={"transformer.h.*": True},
        zero=3,
    )
    model, optimizer = parallelize(plan, model, lambda parameters: torch.optim.AdamW(parameters, lr=5e-4))
    losses = []
    for step in range(steps):
        inputs, targets = corpus.batch(step, 8, 32)
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train())
