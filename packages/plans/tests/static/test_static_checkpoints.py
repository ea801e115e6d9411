"""A forward that checkpoints a block by itself: what a static block saves is what was saved when it was recorded."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import Shard
from vescale_dtensor.testing import run_ranks
from vescale_plans import Plan, parallelize


class Recomputed(nn.Module):
    """Its first layer cuts the batch's features, which need no gradient: the slice is an object that hooks keep."""

    def __init__(self, saved):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
        self.head = nn.Linear(6, 3)
        self.saved = saved

    def forward(self, x):
        if self.saved == "host":
            with torch.autograd.graph.save_on_cpu():
                return self.head(self.inner(x))
        return self.head(checkpoint(self.inner, x, use_reentrant=self.saved == "reentrant"))


def trained(plan, saved, mode):
    torch.manual_seed(0)
    model = Recomputed(saved)
    model, optimizer = parallelize(plan, model, lambda p: torch.optim.SGD(p, lr=0.1), mode=mode)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(8, 6, requires_grad=saved == "reentrant")).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses + [p.detach().full_tensor() for p in model.parameters()]


PLAN = Plan(mesh={"tp": 2}, parameters={"inner.0.weight": {"tp": Shard(1)}, "inner.2.*": {"tp": Shard(0)}, "*": {}})


@pytest.mark.parametrize("mode", ["auto", "static"])
@pytest.mark.parametrize("saved", ["again", "reentrant", "host"])
def test_a_static_block_in_a_checkpoint_equals_one_device(saved, mode):
    alone = run_ranks(1, trained, Plan(mesh={}, parameters={"*": {}}), saved, "eager")[0]
    for ranks in run_ranks(2, trained, PLAN, saved, mode):
        torch.testing.assert_close(ranks, alone)
