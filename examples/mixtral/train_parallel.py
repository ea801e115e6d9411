"""Trains the model of this folder on many devices. `train.py` is the same on one: compare the two."""

import torch
from corpus import VOCABULARY, read_corpus
from mixtral.model import build

from vescale import Boundary, InterleavedShard, Plan, Replicate, Shard, parallelize


def train(steps: int = 20) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    corpus = read_corpus(None, seed=0, device=torch.device("cpu"))
    model = build(vocab_size=VOCABULARY)
    rows, columns, whole = {"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Replicate()}
    sharded = Boundary(input=whole, output={"tp": Shard(1)})  # between blocks every rank holds a part of the sequence
    experts = {"*.gate_up_proj": {"tp": InterleavedShard(1, 2)}, "*.down_proj": {"tp": Shard(2)}}
    plan = Plan(
        mesh={"ep": 2, "tp": 2},
        parameters={**experts, "*.o_proj.*": columns, "*_proj.*": rows, "*.embed_*": rows, "lm_head.*": rows, "*": {}},
        boundaries={"*.self_attn": sharded, "*.mlp": sharded, "lm_head": Boundary(input=whole)},
        data_axis="ep",
        expert_axis="ep",
    )
    model, optimizer = parallelize(plan, model, lambda parameters: torch.optim.AdamW(parameters, lr=5e-4))
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
