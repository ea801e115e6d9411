"""Experts of a list that write state of their own in their forward, against one device."""

import pytest
import torch
from torch import nn

import vescale
from vescale_plans import Plan, PlanError
from vescale_testkit import raises_on_all, run_ranks

WIDTH, EXPERTS, CHOSEN, ROWS = 8, 4, 2, 26

pytestmark = pytest.mark.filterwarnings("ignore:where has no rule", "ignore:vescale_plans. the block of")


class Expert(nn.Module):
    """Writes under a condition: the number of rows, the step, or gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, WIDTH)
        self.kind, self.count, self.seen, self.on = kind, 0, [], kind != "later"
        self.register_buffer("total", torch.zeros(()))
        if kind in ("attribute", "list"):
            self.norm = nn.Identity()
            del self._buffers["total"]

    def forward(self, rows):
        made = self.a(rows)
        if self.kind == "always" or (self.kind in ("norm", "later") and len(rows) >= 2 and self.on):
            made = self.norm(made)
        if self.kind == "buffer" and torch.is_grad_enabled():
            self.total += len(rows)
        if self.kind == "replaced" and len(rows) > 3:
            self.total = self.total * 0.5 + rows.detach().mean()
        if self.kind == "attribute" and self.training:
            self.count += len(rows)
        if self.kind == "list" and len(rows) >= 2:
            self.seen.append((len(rows), rows.detach().sum()))
        return self.b(made.relu())


class Block(nn.Module):
    def __init__(self, kind: str, writes: bool) -> None:
        super().__init__()
        self.router, self.head, self.writes = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 3), writes
        self.experts = nn.ModuleList(Expert(kind) for _ in range(EXPERTS))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(CHOSEN, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            out.index_add_(0, token, expert(x[token]) * shares[token, slot, None])
        if self.writes:
            self.calls += 1
        return self.head(x + out)


KINDS = ("norm", "later", "always", "buffer", "replaced", "attribute", "list")


def kept(model):
    """What each expert holds, plain."""
    found = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.buffers()]
    return [one.clone() for one in found], [(each.count, each.seen[:]) for each in model.experts]


class Slots(Block):
    """Calls each expert once per slot."""

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(CHOSEN, -1)
        out = torch.zeros_like(x)
        for slot in range(CHOSEN):
            for i, expert in enumerate(self.experts):
                here = chosen[:, slot] == i
                out[here] = out[here] + expert(x[here]) * shares[here, slot, None]
        return self.head(x + out)


def run(plan: Plan | None, writes: bool, block=Block):
    found = []
    for kind in KINDS:
        torch.manual_seed(0)
        model = block(kind, writes).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if plan is not None:
            model, optimizer = vescale.parallelize(plan, model, optimizer)
        for step in range(4):
            x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            for expert in model.experts:
                expert.on = expert.kind != "later" or step >= 2
                expert.training = step == 3 or kind != "attribute"  # writes late
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), *kept(model)))
        model.eval()
        with torch.no_grad():
            found.append((model(x).square().mean().item(), *kept(model)))
    return found


def plan_of(ranks: int) -> Plan:
    return Plan(mesh={"ep": ranks}, parameters={"*": {}}, data_axis="ep", expert_axis="ep")


@pytest.mark.parametrize("ranks, writes", [(2, False), (4, False), (2, True)])
def test_state_is_that_of_one_device(ranks, writes):
    expected = run(None, writes)
    for found in run_ranks(ranks, run, plan_of(ranks), writes):
        torch.testing.assert_close(found, expected)


def test_calls_of_one_expert_one_after_the_other():
    expected = run(None, False, Slots)
    for found in run_ranks(2, run, plan_of(2), False, Slots):
        torch.testing.assert_close(found, expected)


def test_rows_of_several_data_ranks():
    plan = Plan(mesh={"dp": 2, "ep": 2}, parameters={"*": {}}, data_axis="dp", expert_axis="ep")
    expected = run(None, False)
    for found in run_ranks(4, run, plan, False):
        torch.testing.assert_close(found, expected)


class Dense(Block):
    """Hands its own rows to every expert: over a data axis each rank has its part of them."""

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        return self.head(x + sum(expert(x) * shares[:, i, None] for i, expert in enumerate(self.experts)))


def refused(plan: Plan):
    torch.manual_seed(0)
    model, _ = vescale.parallelize(plan, Dense("always", False), None)
    model(torch.randn(ROWS, WIDTH))


def test_rows_on_several_ranks_are_refused():
    plan = Plan(mesh={"dp": 2, "ep": 2}, parameters={"*": {}}, data_axis="dp", expert_axis="ep")
    raises_on_all(4, PlanError, refused, plan, match="each rank of axis 'dp' from its own rows")
