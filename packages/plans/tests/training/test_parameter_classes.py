"""Parameters of a user's class: they stay of it, with what it adds to tensors."""

import copy

import pytest
import torch
from torch import nn

from vescale_dtensor import Shard
from vescale_plans import Plan, PlanError, parallelize
from vescale_testkit import raises_on_all, run_ranks


class Scale(nn.Parameter):
    """Told by its class."""


class Factors(nn.Parameter):
    """Methods, a property, attributes of the class and of the object, and a constructor of its own."""

    rank = 2

    def __new__(cls, data, gain=1.0):
        made = super().__new__(cls, data)
        made.gain = gain
        return made

    @property
    def halves(self):
        return self[:, : self.rank], self[: self.rank]

    def low_rank(self):
        left, right = self.halves
        return self.scaled(left @ right, self.gain)

    @staticmethod
    def scaled(value, gain):
        return value * gain

    @classmethod
    def wider(cls):
        return cls.rank + 1

    def __repr__(self):
        return f"Factors({self.gain})"


class Named(Factors):
    def low_rank(self):
        return super().low_rank() + self.t() / self.wider()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.factors, self.named = Factors(torch.randn(6, 6), gain=0.5), Named(torch.randn(6, 6))
        self.scale, self.one = Scale(torch.full((6,), 2.0)), Scale(torch.tensor(0.5))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) @ self.factors.low_rank() @ self.named.low_rank()
        for parameter in self.parameters(recurse=False):
            if isinstance(parameter, Scale):
                x = x * parameter
        return self.head(x)


def groups(parameters):
    parameters = list(parameters)
    held = [
        {"params": [one], "weight_decay": 0.0 if isinstance(one, Scale) else 0.1}
        for one in parameters
        if not isinstance(one, Factors)
    ]
    held += [{"params": [one], "lr": 0.01 * one.gain} for one in parameters if isinstance(one, Factors)]
    return torch.optim.SGD(held, lr=0.02)


def train(model, optimizer):
    found = []
    for seed in range(3):
        loss = model(torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, [(getattr(one, "full_tensor", one.clone)()).detach().clone() for one in model.parameters()]


def run(options: dict | None):
    torch.manual_seed(0)
    model = Net()
    if options is None:
        optimizer = groups(model.parameters())
    else:
        model, optimizer = parallelize(Plan(**options), model, groups)
        other = copy.deepcopy(model)
        for one in (model, other):
            assert isinstance(one.factors, Factors) and not isinstance(one.factors, (Scale, Named))
            assert [type(kind) for kind in (one.scale, one.head.weight)] == [type(one.scale)] * 2
            assert one.named.__class__ is Named and one.named.wider() == 3
            assert not isinstance(one.first.weight, (Scale, Factors)) and isinstance(one.first.weight, nn.Parameter)
            assert not hasattr(one.scale, "low_rank") and not hasattr(one.first(torch.ones(2, 5)), "gain")
    return train(model, optimizer)


TP = {"first.weight": {"tp": Shard(0)}, "first.bias": {"tp": Shard(0)}, "factors": {"tp": Shard(1)}, "*": {}}


@pytest.mark.parametrize(
    "ranks, options",
    [
        (1, {"mesh": {"dp": 1}, "parameters": {"*": {}}}),
        (2, {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 1}),
        (2, {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 3}),
        (2, {"mesh": {"tp": 2}, "parameters": TP}),
    ],
)
def test_one_devices_numbers(ranks, options):
    expected = run(None)
    for found in run_ranks(ranks, run, options):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Doubles(nn.Parameter):
    def __mul__(self, other):
        return torch.Tensor.__mul__(self, other) * 2


class Counts(nn.Parameter):
    @property
    def gain(self):
        return self._gain

    @gain.setter
    def gain(self, value):
        self._gain = value + 1


class Watches(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("kind, name", [(Doubles, "__mul__"), (Counts, "gain"), (Watches, "__torch_function__")])
def test_what_a_shard_cannot_do_is_refused(kind, name):
    def run():
        model = nn.Linear(3, 3)
        model.weight = kind(model.weight.detach())
        parallelize(Plan(mesh={"dp": 1}, parameters={"*": {}}), model, None)

    assert f"'weight' is of the class {kind.__name__}, which changes {name}" in raises_on_all(1, PlanError, run)
