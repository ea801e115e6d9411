"""Under a Precision a block takes what its caller made in another dtype: it is cast, as the root's inputs are."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from vescale_dtensor import Shard
from vescale_plans import Plan, Precision, parallelize
from vescale_testkit import run_ranks

LOW = torch.bfloat16
TP = {"blocks.*.up.*": {"tp": Shard(0)}, "blocks.*.down.weight": {"tp": Shard(1)}}
PLANS = {
    "dp2": Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=1, precision=Precision(LOW)),
    "dp2 zero 3": Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, precision=Precision(LOW)),
    "dp2 tp2 zero 3": Plan(mesh={"dp": 2, "tp": 2}, parameters={**TP, "*": {}}, zero=3, precision=Precision(LOW)),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.seen = []

    def forward(self, x, parts, *, scale, at):
        self.seen.append({x.dtype, parts["bias"].dtype, scale.dtype})
        assert at.dtype == torch.int64
        return self.down(torch.relu(self.up(x) + parts["bias"])) * scale


class Net(nn.Module):
    """Computes the sums of its residuals in float32. `by_hand`: casts what it gives its blocks itself."""

    def __init__(self, by_hand=False):
        super().__init__()
        self.by_hand, self.blocks, self.out = by_hand, nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 4)

    def forward(self, x):
        x = x.float()
        for at, block in enumerate(self.blocks):
            bias, scale = x.mean(-1, keepdim=True), torch.tensor(0.5, dtype=torch.float64)
            cast = (lambda one: one.to(LOW)) if self.by_hand else (lambda one: one)
            x = x + block(cast(x), {"bias": cast(bias)}, scale=cast(scale), at=torch.tensor(at))
        return self.out(x.to(LOW))


def batch(step):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(step))  # uneven over two ranks


def trained(plan):
    torch.manual_seed(0)
    model, optimizer = parallelize(plan, Net(), make)
    for step in range(3):
        model(batch(step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(seen == {LOW} for block in model.blocks for seen in block.seen)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def make(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def on_one_device():
    torch.manual_seed(0)
    model = Net(by_hand=True)
    optimizer = make(model.parameters())
    for step in range(3):
        low = {name: parameter.to(LOW) for name, parameter in model.named_parameters()}
        functional_call(model, low, batch(step).to(LOW)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", PLANS)
def test_blocks_take_other_dtypes_and_train_as_one_device(name):
    wanted = on_one_device()
    torch.manual_seed(0)
    first = {name: parameter.detach() for name, parameter in Net().named_parameters()}
    for found in run_ranks(PLANS[name].world_size, trained, PLANS[name]):
        for key, value in wanted.items():
            moved = (value - first[key]).norm()
            assert moved > 0 and (found[key] - value).norm() / moved < 4e-2, key  # eight bits of mantissa
