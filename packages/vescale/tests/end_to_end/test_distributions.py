"""Draws of torch.distributions in parallelized models, inside and outside of them: as on one device."""

from functools import partial

import pytest
import torch
from torch import distributions, nn
from torch.nn import functional as F

import vescale
from vescale_plans import Plan
from vescale_testkit import run_ranks, warm_up

warm_up("vescale")

WIDTH, ROWS, STEPS = 6, 8, 3
DRAWN = {
    "normal": lambda x: distributions.Normal(x, 0.5).rsample(),
    "gamma": lambda x: distributions.Gamma(F.softplus(x) + 0.5, 1.0).rsample(),
    "beta": lambda x: distributions.Beta(F.softplus(x) + 0.5, F.softplus(-x) + 0.5).rsample(),
    "dirichlet": lambda x: distributions.Dirichlet(F.softplus(x) + 0.5).rsample(),
    "gumbel": lambda x: distributions.RelaxedOneHotCategorical(torch.tensor(0.7), logits=x).rsample(),
    "laplace": lambda x: distributions.Laplace(x, 1.0).rsample(),
}


class Model(nn.Module):
    def __init__(self, draw, inside):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))
        self.draw = DRAWN[draw] if inside else nn.Identity()

    def forward(self, x):
        return self.draw(self.layers(x))


def trained(plan, draw, inside):
    torch.manual_seed(0)
    model = Model(draw, inside).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if plan is not None:
        model, optimizer = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
    losses = []
    for _ in range(STEPS):
        out = model(torch.randn(ROWS, WIDTH, dtype=torch.float64))
        loss = (out if inside else DRAWN[draw](out)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def apart(plan, inside):
    """Draws whose losses are not those of one device, with both. Runs on every rank."""
    found = {draw: (trained(None, draw, inside), trained(plan, draw, inside)) for draw in DRAWN}
    return {
        draw: pair for draw, pair in found.items() if max(abs(a / b - 1) for a, b in zip(*pair)) > 1e-12
    }  # fmt: skip


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("zero", [0, 3])
def test_losses_of_what_was_drawn(zero, inside):
    assert run_ranks(2, apart, Plan({"dp": 2}, {"*": {}}, zero=zero), inside) == [{}, {}]
