"""A user's script in which a type checker finds nothing: what `parallelize` gives back keeps its type."""

import torch
from torch import nn

import vescale
from vescale import Pipeline, Plan, Precision, Shard


class Net(nn.Module):
    def answer(self) -> int:
        return 3


plan = Plan(
    mesh={"pp": 2, "dp": 2, "tp": 2},
    parameters={"*.weight": {"tp": Shard(0)}, "*": {}},
    zero=1,
    precision=Precision(torch.bfloat16),
    pipeline=Pipeline(axis="pp", cuts=("4",), microbatches=4),
)
model, optimizer = vescale.parallelize(plan, Net(), lambda given: torch.optim.AdamW(given, lr=1e-3), mode="compile")
number: int = model.answer()
adamw: torch.optim.AdamW = optimizer
given_model, given = vescale.parallelize(plan, Net(), torch.optim.SGD(Net().parameters(), lr=0.1))
sgd: torch.optim.SGD = given
alone, nothing = vescale.parallelize(plan, Net())
none: None = nothing
vescale.save("checkpoints", {"model": model, "optimizer": optimizer}, step=3)
found: Plan = vescale.generate_plan(model, world_size=8, batch=4)
text: str = found.to_json()
