"""Stacked experts whose forward takes their number from an attribute: inside of it, as many as a rank holds."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_plans import Plan, PlanError, parallelize
from vescale_testkit import raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, INNER = 4, 6


class Loop(nn.Module):
    """Loops over a number that is named for nothing."""

    def __init__(self, count):
        super().__init__()
        self.E, self.width = count, WIDTH
        self.w1 = nn.Parameter(torch.randn(count, WIDTH, INNER) / 3)
        self.w2 = nn.Parameter(torch.randn(count, INNER, WIDTH) / 3)

    def count(self):
        return self.E

    def forward(self, rows, chosen, weights):
        rows = rows.view(-1, self.width)  # as many as there are experts
        out = torch.zeros_like(rows)
        for expert in range(self.count()):
            token, slot = torch.where(chosen == expert)
            made = F.silu(rows[token] @ self.w1[expert]) @ self.w2[expert]
            out = out.index_add(0, token, made * weights[token, slot, None])
        return out


class Shape(Loop):
    """The first remedy: nothing is to be replaced."""

    def count(self):
        return self.w1.shape[0]


class Named(Loop):
    """The second one."""

    def __init__(self, count):
        super().__init__(count)
        self.num_experts = count

    def count(self):
        return self.num_experts


class Twice(Loop):
    """Two numbers, and both count."""

    def __init__(self, count):
        super().__init__(count)
        self.n = count

    def count(self):
        assert self.w1.flatten(0, 1).view(self.n, WIDTH, INNER).shape == self.w1.shape
        return self.E


class Dense(Loop):
    """All experts at once, in one product of batches."""

    def forward(self, rows, chosen, weights):
        shares = rows.new_zeros(len(rows), self.E).scatter(1, chosen, weights)
        made = F.silu(rows.expand(self.E, -1, -1).bmm(self.w1)).bmm(self.w2)
        return (made * shares.t().unsqueeze(-1)).sum(0)


class Written(Loop):
    """The number is part of the code."""

    def count(self):
        return 4


class Config:
    count = 4


class Configured(Loop):
    def __init__(self, count):
        super().__init__(count)
        self.config = Config()
        del self.E

    def count(self):
        return self.config.count


class Mixture(nn.Module):
    def __init__(self, kind, count):
        super().__init__()
        self.router, self.stack = nn.Linear(WIDTH, count), kind(count)

    def forward(self, rows):
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return (rows + self.stack(rows, chosen, weights)).square().mean()


PLAN = Plan({"ep": 2}, {"*": {}}, data_axis="ep", expert_axis="ep")


def build(kind, count):
    torch.manual_seed(0)
    return Mixture(kind, count)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def train(model, optimizer):
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(8, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compared(kinds, count):
    found = []
    for kind in kinds:
        alone = build(kind, count)
        expected = train(alone, sgd(alone.parameters()))
        model, optimizer = parallelize(PLAN, build(kind, count), sgd)
        attributes = {key: one for key, one in vars(model.stack).items() if type(one) is int}
        losses = train(model, optimizer)
        assert {key: one for key, one in vars(model.stack).items() if type(one) is int} == attributes
        if not torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-5):
            found.append((kind.__name__, losses, expected))
        for (name, one), other in zip(model.named_parameters(), alone.parameters()):
            if not torch.allclose(one.full_tensor(), other, rtol=1e-4, atol=1e-6):
                found.append((kind.__name__, name))
    return found


@pytest.mark.parametrize("count", [4, 5])
def test_a_number_of_experts_is_that_of_this_rank(count):
    """4 of them are as many as a row is wide, and 5 are not the same on both ranks."""
    assert run_ranks(2, compared, [Loop, Shape, Named, Twice, Dense], count) == [[]] * 2


def refused(kind):
    model, _ = parallelize(PLAN, build(kind, 4), sgd)
    model(torch.randn(8, WIDTH))


@pytest.mark.parametrize("kind", [Written, Configured])
def test_a_number_from_elsewhere_says_so(kind):
    raises_on_all(2, PlanError, refused, kind, match=r"it takes their number from elsewhere[\s\S]*self\.w1\.shape\[0\]")


class Careful(nn.Module):
    """Goes on where a module that it calls has raised."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, rows):
        try:
            rows = self.second(rows)
        except Exception:
            rows = self.first(rows)
        return rows.square().mean()


def goes_on():
    model, optimizer = parallelize(Plan({"dp": 2}, {"*": {}}), Careful(), sgd)
    return train(model, optimizer)


def test_a_module_that_raises_inside_of_a_call_that_goes_on():
    """Static mode looks at the calls that a module makes, and one of them has not ended."""
    first, second = run_ranks(2, goes_on)
    assert first == second and len(first) == 3
