"""A capacity per expert drops the same rows on every mesh, and says how many."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import Replicate
from vescale_plans import Plan, expert_drops, expert_load, parallelize
from vescale_plans._experts.capacity import counted
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, INNER, EXPERTS, CHOSEN, CLASSES = 6, 10, 7, 3, 5


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)
        self.out = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 3)
        self.experts = EXPERTS

    def forward(self, rows, picked, shares):
        total = torch.zeros_like(rows)
        for expert in range(self.experts):
            row, slot = torch.where(picked == expert)
            one = torch.tanh(rows[row] @ self.into[expert]) @ self.out[expert]
            total = total.index_add(0, row, one * shares[row, slot, None])
        return total


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.stack, self.head = nn.Linear(WIDTH, EXPERTS), Stack(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, y):
        rows = x.reshape(-1, WIDTH)
        shares, picked = self.router(rows).softmax(-1).topk(CHOSEN, dim=-1)
        return F.cross_entropy(self.head(rows + self.stack(rows, picked, shares)), y.reshape(-1))


class ByHand(Mixture):
    """The rule as one device would write it: row by row, in the order of tokens and then of choices."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x, y):
        rows = x.reshape(-1, WIDTH)
        shares, picked = self.router(rows).softmax(-1).topk(CHOSEN, dim=-1)
        room = [max(1, -int(-self.factor * picked.numel() // EXPERTS))] * EXPERTS
        taken = torch.zeros_like(shares)
        self.dropped = [0] * EXPERTS
        for token, slot in torch.cartesian_prod(torch.arange(len(rows)), torch.arange(CHOSEN)).tolist():
            expert = int(picked[token, slot])
            taken[token, slot] = float(room[expert] > 0)
            self.dropped[expert] += room[expert] <= 0
            room[expert] -= 1
        return F.cross_entropy(self.head(rows + self.stack(rows, picked, shares * taken)), y.reshape(-1))


def data(batch):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, 3, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (batch, 3), generator=generator)


MESHES = {
    "ep4": Plan({"ep": 4}, {"*": {}}, data_axis="ep", expert_axis="ep"),
    "ep2, the batch whole": Plan({"ep": 2, "tp": 2}, {"*": {}}, data_axis=None, expert_axis="ep"),
    "dp2 ep2": Plan({"dp": 2, "ep": 2}, {"*": {}}, data_axis=("dp", "ep"), expert_axis="ep"),
    "ep2 beside dp2": Plan({"dp": 2, "ep": 2}, {"*": {}}, data_axis="dp", expert_axis="ep"),
    "experts whole, dp4": Plan({"dp": 4}, {"stack.*": {"dp": Replicate()}, "*": {}}, expert_axis="dp"),
}


def against_one_device(plan, factor, batch):
    """Largest difference of loss and gradients; load and drops, here and by hand."""
    torch.manual_seed(0)
    alone = ByHand(factor).double()
    with torch.no_grad():
        alone.router.bias[:2] += 1.5  # a skew, so that some overflow
    model = Mixture().double()
    model.load_state_dict(alone.state_dict())
    model, _ = parallelize(plan.override(capacity_factor=factor), copy.deepcopy(model))
    losses = []
    for one in (alone, model):
        losses.append(one(*data(batch)))
        losses[-1].backward()
    pairs = [(a.grad, b.grad.full_tensor()) for a, b in zip(alone.parameters(), model.parameters())]
    worst = max((a - b).abs().max().item() for a, b in [(losses[0].detach(), losses[1].detach().full_tensor()), *pairs])
    return worst, expert_load(model)["stack"], expert_drops(model)["stack"], alone.dropped


@pytest.mark.parametrize("factor", [0.5, 1.25])
@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_dropped_is_what_one_device_drops(mesh, factor):
    for batch in (5, 8):
        for worst, load, drops, by_hand in run_ranks(4, against_one_device, MESHES[mesh], factor, batch):
            assert worst < 1e-13
            assert drops == by_hand and sum(drops) > 0
            assert sum(load) + sum(drops) == batch * 3 * CHOSEN


def test_without_overflow_nothing_is_dropped():
    for worst, _, drops, _ in run_ranks(4, against_one_device, MESHES["dp2 ep2"], 7.0, 5):
        assert worst < 1e-13 and sum(drops) == 0


@pytest.mark.parametrize("rows", [0, 1, 50])
def test_rows_are_counted_as_bincount_counts_them(rows):
    chosen = torch.randint(5, (rows,), generator=torch.Generator().manual_seed(rows))
    assert torch.equal(counted(chosen, 7), torch.bincount(chosen, minlength=7))
