"""A model that does not fit is planned before it has memory: the plan is that of the model with values."""

import pytest
import torch
from torch import nn

from vescale_dtensor import Shard
from vescale_plans import Plan, generate_plan
from vescale_rng import deferred_init, is_deferred, materialize

IDS = torch.zeros(1, 8, dtype=torch.long)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("scale", torch.rand(16) + 0.5)
        self.up.weight.is_special = True

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x * self.scale))))


class Net(nn.Module):
    """With a weight that is tied, buffers that are written to, and one that no forward reads."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(64, 16), nn.ModuleList(Block() for _ in range(2))
        self.batch, self.head = nn.BatchNorm1d(8), nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("unused", torch.arange(6.0).reshape(2, 3).t())

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.batch(x))


GIVEN = Plan(mesh={"tp": 2}, parameters={"blocks.*.up.*": {"tp": Shard(0)}})
PLANNED = {
    "generate_plan": lambda model: generate_plan(model, world_size=2, batch=4, sample=IDS),
    "pinned": lambda model: generate_plan(model, world_size=4, batch=4, sample=IDS, pin={"tp": 2}),
    "complete": lambda model: GIVEN.complete(model, IDS),
}


@pytest.mark.parametrize("how", PLANNED)
def test_the_plan_is_that_of_the_model_with_values(how):
    plain = Net()
    with deferred_init():
        torch.manual_seed(0)
        deferred = Net()
    kinds = [is_deferred(one) for one in (*deferred.parameters(), *deferred.buffers())]
    assert PLANNED[how](deferred) == PLANNED[how](plain)
    assert [is_deferred(one) for one in (*deferred.parameters(), *deferred.buffers())] == kinds  # it is as it was
    torch.manual_seed(0)
    made = Net()
    materialize(deferred)
    for (name, value), (_, wanted) in zip(deferred.state_dict().items(), made.state_dict().items(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=0, msg=name)
    assert deferred.head.weight is deferred.embed.weight and deferred.blocks[0].up.weight.is_special
