"""A layer that its module casts in a forward (NLLB's router): refused by name, or trained as on one device."""

from functools import partial

import pytest
import torch
from torch import nn

from vescale_plans import Plan, PlanError, parallelize
from vescale_testkit import raises_on_all, run_ranks, warm_up

warm_up("vescale_plans")

WIDTH, ROWS, STEPS = 16, 4, 3


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.classifier = self.classifier.to(torch.float32)
        return x * self.classifier(x.float()).to(x.dtype)


def trained(zero, is_cast_before):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Router(), nn.Linear(WIDTH, WIDTH)).double()
    if is_cast_before:
        model[1].classifier.to(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if zero is not None:
        model, optimizer = parallelize(Plan({"dp": 2}, {"*": {}}, zero=zero), model, partial(torch.optim.SGD, lr=0.1))
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(ROWS, WIDTH, dtype=torch.float64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_cast_on_the_way_is_refused_by_name(zero):
    raises_on_all(2, PlanError, trained, zero, False, match=r"1\.classifier\.(weight|bias)  torch\.float32")


@pytest.mark.parametrize("zero, is_cast_before", [(0, True), (1, True), (2, True), (3, True), (3, False)])
def test_what_is_accepted_trains_as_on_one_device(zero, is_cast_before):
    for losses in run_ranks(2, trained, zero, is_cast_before):
        assert losses == pytest.approx(trained(None, False), rel=1e-6)
