"""Stacked experts that write state of their own in their forward, against one device."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import Replicate
from vescale_plans import Plan, PlanError, parallelize
from vescale_testkit import raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, INNER, EXPERTS = 6, 8, 4
pytestmark = pytest.mark.filterwarnings("ignore:where has no rule", "ignore:vescale_plans. .* of itself")


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 2)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 2)
        self.E = EXPERTS
        self.register_buffer("count", torch.zeros(EXPERTS))

    def write(self, rows, chosen):
        self.count += torch.bincount(chosen.flatten(), minlength=self.E)

    def forward(self, rows, chosen, weights):
        self.write(rows, chosen)
        out = torch.zeros_like(rows)
        for expert in range(self.E):
            token, slot = torch.where(chosen == expert)
            made = F.silu(rows[token] @ self.w1[expert]) @ self.w2[expert]
            out = out.index_add(0, token, made * weights[token, slot, None])
        return out * (1 + self.count.mean() / 100)

    def kept(self):
        return self.count


class Training(Stack):
    def write(self, rows, chosen):
        if self.training:
            super().write(rows, chosen)


class Recording(Stack):
    def write(self, rows, chosen):
        if torch.is_grad_enabled():
            self.count = self.count + rows.detach().abs().mean()


class Number(Stack):
    seen = 0

    def write(self, rows, chosen):
        self.seen += len(rows)

    def kept(self):
        return torch.tensor(self.seen)


class SomeSlices(Stack):
    """Whether it writes, ranks see otherwise by the slices that they hold: the last expert's weights are large."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.w1[-1].add_(4.0)

    def write(self, rows, chosen):
        if self.w1.max() > 4:
            self.count += rows.detach().abs().mean()


class Late(Stack):
    """Writes once the training loop says so."""

    writes = False

    def write(self, rows, chosen):
        if self.writes:
            self.count.add_(1)


class Mixture(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.router, self.stack = nn.Linear(WIDTH, EXPERTS), kind()

    def forward(self, rows):
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return (rows + self.stack(rows, chosen, weights)).square().mean()


KINDS = [Stack, Training, Recording, Number, SomeSlices]
PLANS = {
    "ep2, batch over ep": Plan({"ep": 2}, {"*": {}}, data_axis="ep", expert_axis="ep"),
    "ep2, no data axis": Plan({"ep": 2}, {"*": {}}, data_axis=None, expert_axis="ep"),
    "ep2, replaced": Plan({"ep": 2}, {"stack.*": {"ep": Replicate()}, "*": {}}, data_axis="ep", expert_axis="ep"),
    "dp2 ep2, zero 3": Plan({"dp": 2, "ep": 2}, {"*": {}}, data_axis=("dp", "ep"), expert_axis="ep", zero=3),
}


def build(kind):
    torch.manual_seed(0)
    return Mixture(kind).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().double().clone()


def trained(model, optimizer, modes):
    torch.manual_seed(1)
    seen = []
    for _ in range(3):
        for train in modes:
            model.train(train)
            with torch.set_grad_enabled(train):
                loss = model(torch.randn(8, WIDTH, dtype=torch.float64))
            if train:
                loss.backward()
            seen += [whole(loss), whole(model.stack.kept())]
        optimizer.step()
        optimizer.zero_grad()
        seen += map(whole, model.parameters())
    return seen


def compared(plan):
    found = []
    for kind in KINDS:
        for modes in ((True, True, False), (False, True)):
            alone = build(kind)
            expected = trained(alone, sgd(alone.parameters()), modes)
            got = trained(*parallelize(plan, build(kind), sgd), modes)
            found += [f"{kind.__name__} {modes} {i}" for i, (a, b) in enumerate(zip(got, expected, strict=True))
                      if not torch.allclose(a, b, rtol=1e-9, atol=1e-9)][:3]  # fmt: skip
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_state_is_that_of_one_device(plan):
    ranks = 4 if "dp2" in plan else 2
    assert run_ranks(ranks, compared, PLANS[plan]) == [[]] * ranks


def late():
    model, _ = parallelize(PLANS["ep2, batch over ep"], build(Late), sgd)
    for step in range(3):
        model.stack.writes = step == 2
        model(torch.randn(8, WIDTH, dtype=torch.float64)).backward()


def capped():
    plan = PLANS["ep2, batch over ep"].override(capacity_factor=1.0)
    model, _ = parallelize(plan, build(Stack), sgd)
    model(torch.randn(8, WIDTH, dtype=torch.float64))


REFUSED = {
    late: "Late writes 'count' of itself in its forward, from rows that travelled here",
    capped: "drops rows before",
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_cannot_be_right_says_why(function):
    raises_on_all(2, PlanError, function, match=REFUSED[function])


def warned():
    model, _ = parallelize(PLANS["ep2, batch over ep"], build(Stack), sgd)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(torch.randn(8, WIDTH, dtype=torch.float64))
    return [str(one.message) for one in found if "of itself" in str(one.message)]


def test_the_first_rank_says_that_a_module_computes_on_the_whole_batch():
    first, second = run_ranks(2, warned)
    assert second == [] and len(first) == 1 and "Stack writes 'count' of itself" in first[0]
