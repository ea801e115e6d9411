"""Optimizers whose `zero_grad` does something of its own."""

import pytest
import torch
from torch import nn

from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks


class Leaky(torch.optim.SGD):
    """A part of the gradient stays."""

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)


class Zeroes(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=False)


class Counts(torch.optim.Adam):
    times = 0

    def zero_grad(self, set_to_none=True):
        self.times += 1
        super().zero_grad(set_to_none)


class Remembers:
    """A mixin before any optimizer: the gradient that goes is added to the next one."""

    kept = ()

    def zero_grad(self, set_to_none=True):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.kept = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        super().zero_grad(set_to_none)
        for parameter, gradient in zip(parameters, self.kept):
            if gradient is not None:
                parameter.grad = gradient * 0.25


class RemembersAdam(Remembers, torch.optim.Adam):
    pass


class Wraps(torch.optim.Optimizer):
    """Lookahead's form: another optimizer steps. Its own step is not known to be elementwise."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.inner, self.times = torch.optim.SGD(self.param_groups, lr=lr), 0

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.times += 1
        self.inner.zero_grad(self.times % 2 == 0)


KINDS = [Leaky, Zeroes, Counts, RemembersAdam, Wraps]


def run(options: dict | None):
    found = []
    for kind in KINDS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        if options is None:
            optimizer = kind(model.parameters(), lr=0.1)
        else:
            plan = Plan(parameters={"*": {}}, **options)
            model, optimizer = parallelize(plan, model, lambda given, kind=kind: kind(given, lr=0.1))
        for seed in range(4):
            model(torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            left = [one.grad for one in model.parameters()]
            found.append([None if one is None else getattr(one, "full_tensor", one.clone)().clone() for one in left])
        found.append([(getattr(one, "full_tensor", one.clone)()).detach().clone() for one in model.parameters()])
        found.append(getattr(optimizer, "times", None))
    return found


@pytest.mark.parametrize("ranks, zero", [(1, 0), (2, 0), (2, 2), (2, 3)])
def test_one_devices_numbers(ranks, zero):
    expected = run(None)
    for found in run_ranks(ranks, run, {"mesh": {"dp": ranks}, "zero": zero}):
        torch.testing.assert_close(found, expected)
