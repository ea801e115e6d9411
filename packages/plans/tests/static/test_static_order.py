"""Static mode where a rank has one index of a dim, whose strides then tell one device's order in memory.

A module's own code may lay its values out otherwise than eager mode does; what it hands to others may not, for what
draws there follows the order.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor.testing import run_ranks, warm_up
from vescale_plans import Plan, explain_static, parallelize, static

warm_up("vescale_plans")

BATCH, POSITIONS, WIDTH, STEPS = 2, 3, 4, 4  # one sample a rank


class Inside(nn.Module):
    """Permuted in its own code, and back before anybody sees it: attention with one head a rank does so."""

    def forward(self, x):
        y = (x.transpose(0, 1) * 2).tanh()
        return (y + 1).sum(0).contiguous()


class Handed(nn.Module):
    """What it permuted goes into a module that draws."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop((x.transpose(0, 1) * 2).tanh()).sum(0)


class Returned(nn.Module):
    """What it permuted is returned."""

    def forward(self, x):
        return (x.transpose(0, 1) * 2).tanh()


class Net(nn.Module):
    def __init__(self, middle, outside):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.middle = middle
        self.outside = outside

    def forward(self, x):
        y = self.middle(self.up(x))
        return F.dropout(y * 1, 0.5) if self.outside else y


MIDDLES = {"inside": (Inside, False), "handed": (Handed, False), "returned": (Returned, True)}


def trained(name, mode):
    make, outside = MIDDLES[name]
    torch.manual_seed(0)
    plan = Plan(mesh={"dp": 2}, parameters={"*": {}})
    model, optimizer = parallelize(plan, Net(make(), outside), lambda p: torch.optim.SGD(p, lr=0.1))
    if mode == "static":
        static(model)
    torch.manual_seed(7)
    seen, generator = [], torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        out = model(torch.randn(BATCH, POSITIONS, WIDTH, generator=generator))
        out.square().sum().backward()
        seen += [out.detach().full_tensor(), *[p.grad.full_tensor() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return seen, explain_static(model).calls["middle"][0] if mode == "static" else ""


def one_device(name):
    make, outside = MIDDLES[name]
    torch.manual_seed(0)
    model = Net(make(), outside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    seen, generator = [], torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        out = model(torch.randn(BATCH, POSITIONS, WIDTH, generator=generator))
        out.square().sum().backward()
        seen += [out.detach().clone(), *[p.grad.clone() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("name", MIDDLES)
def test_one_index_of_a_dim_keeps_one_devices_order(name):
    wanted = one_device(name)
    for eager, found in zip(run_ranks(2, trained, name, "eager"), run_ranks(2, trained, name, "static")):
        assert all(map(torch.equal, eager[0], found[0]))
        for a, b in zip(wanted, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert found[1] == "static" if name == "inside" else found[1] in ("static", "eager")
