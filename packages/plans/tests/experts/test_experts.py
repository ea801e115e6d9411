"""Experts of a user's own making: recognised by structure, equal to one device, and what cannot be spread."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import InterleavedShard, Replicate, Shard, comm_trace
from vescale_plans import Plan, PlanError, expert_load, parallelize
from vescale_testkit import raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, INNER, CLASSES = 6, 10, 5


class Stack(nn.Module):
    """Experts of three weights and a bias, in names of its own; takes weights before indices."""

    def __init__(self, count, biased):
        super().__init__()
        self.how_many_experts = count
        self.into = nn.Parameter(torch.randn(count, WIDTH, INNER) / 3)
        self.gate = nn.Parameter(torch.randn(count, WIDTH, INNER) / 3)
        self.out = nn.Parameter(torch.randn(count, INNER, WIDTH) / 3)
        self.shift = nn.Parameter(torch.randn(count, WIDTH)) if biased else None

    def forward(self, rows, shares, picked):
        total = torch.zeros_like(rows)
        for expert in range(self.how_many_experts):
            row, slot = torch.where(picked == expert)
            one = rows[row]
            one = (one @ self.into[expert] * torch.sigmoid(one @ self.gate[expert])) @ self.out[expert]
            one = one if self.shift is None else one + self.shift[expert]
            total = total.index_add(0, row, one * shares[row, slot, None])
        return total


class Mixture(nn.Module):
    def __init__(self, count=6, chosen=3, biased=True):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(WIDTH, count)
        self.stack = Stack(count, biased)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, y):
        rows = x.reshape(-1, WIDTH)
        shares, picked = self.router(rows).softmax(-1).topk(self.chosen, dim=-1)
        rows = rows + self.stack(rows, shares, picked=picked)
        return F.cross_entropy(self.head(rows), y.reshape(-1))


def data(batch=5):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, 3, WIDTH, generator=generator), torch.randint(CLASSES, (batch, 3), generator=generator)


def build(**sizes):
    torch.manual_seed(0)
    return Mixture(**sizes)


PLANS = {
    "ep4": Plan({"ep": 4}, {"*": {}}, data_axis="ep", expert_axis="ep"),
    "dp2 ep2": Plan({"dp": 2, "ep": 2}, {"*": {}}, data_axis=("dp", "ep"), expert_axis="ep"),
    "ep2 dp2": Plan({"ep": 2, "dp": 2}, {"*": {}}, data_axis=("ep", "dp"), expert_axis="ep"),
    "ep2 beside dp2": Plan({"dp": 2, "ep": 2}, {"*": {}}, data_axis="dp", expert_axis="ep"),
    "experts whole, dp4": Plan({"dp": 4}, {"stack.*": {"dp": Replicate()}, "*": {}}, expert_axis="dp"),
    "experts whole, dp2 tp2": Plan({"dp": 2, "tp": 2}, {"stack.*": {"dp": Replicate()}, "*": {}}, expert_axis="dp"),
    "ep2 tp2": Plan(
        {"ep": 2, "tp": 2},
        {"stack.into": {"tp": Shard(2)}, "stack.gate": {"tp": Shard(2)}, "stack.out": {"tp": Shard(1)},
         "*": {}},
        data_axis="ep",
        expert_axis="ep",
    ),
}  # fmt: skip


def gradients(plan, double=False, **sizes):
    """Largest difference of loss, gradients and, with `double`, the gradients of a gradient's norm."""
    alone = build(**sizes).to(torch.float64)
    model, _ = parallelize(plan, copy.deepcopy(alone))
    x, y = data()
    found = []
    for one in (alone, model):
        loss = one(x.double(), y)
        if double:
            first = torch.autograd.grad(loss, one.stack.into, create_graph=True)[0]
            loss = loss + first.square().sum()
        loss.backward()
        found.append([loss.detach()] + [parameter.grad for parameter in one.parameters()])
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in found[1]]
    assert all(value.abs().max() > 0 for value in found[0])
    return max((a - b).abs().max().item() for a, b in zip(found[0], whole))


@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("plan", [name for name in PLANS if name != "ep2 tp2"])
def test_gradients_equal_one_device(plan, count):
    assert max(run_ranks(4, gradients, PLANS[plan], count=count)) < 1e-13


def whole_experts():
    model, _ = parallelize(PLANS["experts whole, dp4"], build())
    x, y = data()
    with comm_trace(model) as trace:
        model(x, y)
    return [e.kind for e in trace.events if e.cause.module == "stack"], expert_load(model)["stack"]


def test_experts_that_a_plan_keeps_whole_compute_the_rows_that_are_there():
    found = run_ranks(4, whole_experts)
    assert all(kinds == [] and load == found[0][1] for kinds, load in found)
    assert sum(found[0][1]) == 5 * 3 * 3


@pytest.mark.parametrize("biased", [True, False])
def test_experts_split_inside(biased):
    """A bias that is whole on all ranks of the axis counts once."""
    assert max(run_ranks(4, gradients, PLANS["ep2 tp2"], biased=biased)) < 1e-13


def test_a_gradient_of_a_gradient():
    assert max(run_ranks(4, gradients, PLANS["dp2 ep2"], double=True)) < 1e-12


def loads():
    model, _ = parallelize(PLANS["dp2 ep2"], build())
    x, y = data()
    model(x, y)
    inside = model.stack.how_many_experts, [tuple(p.shape) for p in model.stack.parameters()]
    return expert_load(model)["stack"], inside


def test_the_module_is_as_it_was_after_its_forward():
    alone = build()
    x, _ = data()
    picked = alone.router(x.reshape(-1, WIDTH)).softmax(-1).topk(3, dim=-1).indices
    for load, (count, shapes) in run_ranks(4, loads):
        assert load == torch.bincount(picked.reshape(-1), minlength=6).tolist()
        assert (count, shapes) == (6, [tuple(p.shape) for p in alone.stack.parameters()])


class Fails(Stack):
    def forward(self, rows, shares, picked):
        raise ValueError("inside")


def left_clean():
    model = build()
    model.stack.__class__ = Fails
    model, _ = parallelize(PLANS["dp2 ep2"], model)
    with pytest.raises(ValueError, match="inside"):
        model(*data())
    return model.stack.how_many_experts, all(isinstance(p, nn.Parameter) for p in model.stack.parameters())


def test_a_forward_that_raises_leaves_the_module_as_it_was():
    assert run_ranks(4, left_clean) == [(6, True)] * 4


def no_experts():
    parallelize(PLANS["ep4"], nn.Linear(4, 4))


def too_few():
    parallelize(PLANS["ep4"], build(count=5))


class Flat(Mixture):
    def forward(self, x, y):
        shares, picked = self.router(x).softmax(-1).topk(self.chosen, dim=-1)
        return self.stack(x, shares, picked).sum()


def split_differently():
    plan = Plan({"ep": 2, "dp": 2}, {"stack.out": {"ep": Shard(1)}, "*": {}}, expert_axis="ep")
    parallelize(plan, build())


def three_dims():
    model = build()
    model.__class__ = Flat
    model, _ = parallelize(PLANS["dp2 ep2"], model)
    model(*data())


class Scaled(Stack):
    def forward(self, rows, shares, picked):
        return super().forward(rows * self.shift.mean(0), shares, picked)


def scale_of_split_experts():
    model = build()
    model.stack.__class__ = Scaled
    model, _ = parallelize(PLANS["ep2 tp2"], model)
    model(*data())


@pytest.mark.parametrize(
    "function, words",
    [
        (no_experts, "spreads experts over axis 'ep', and the model has none"),
        (too_few, "'stack' has 5 experts, and torch.chunk over the 4 ranks of axis 'ep' leaves 1 without one"),
        (split_differently, "the parameters of 'stack', one slice per expert, lie differently on axis 'ep'"),
        (scale_of_split_experts, "over axis 'tp' its experts are split inside, but shift is not"),
        (three_dims, r"it must be called with tokens \[T, hidden\], indices \[T, k\] and weights \[T, k\]"),
    ],
)
def test_what_cannot_be_spread_says_why(function, words):
    raises_on_all(4, PlanError, function, match=words)


# --- weights that hold several, split inside ---------------------------------------------------


class Packed(nn.Module):
    """Gate and up in one weight [experts, 2 * INNER, WIDTH], cut in two by the forward."""

    def __init__(self, num_experts=4):
        super().__init__()
        self.num_experts = num_experts
        self.gate_up = nn.Parameter(torch.randn(num_experts, 2 * INNER, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(num_experts, WIDTH, INNER) / 3)

    def forward(self, rows, picked, shares):
        total = torch.zeros_like(rows)
        for expert in range(self.num_experts):
            row, slot = torch.where(picked == expert)
            gate, up = F.linear(rows[row], self.gate_up[expert]).chunk(2, -1)
            one = F.linear(F.silu(gate) * up, self.down[expert])
            total = total.index_add(0, row, one * shares[row, slot, None])
        return total


class Merged(Mixture):
    def __init__(self):
        super().__init__(count=4, chosen=2, biased=False)
        self.stack = Packed()

    def forward(self, x, y):
        rows = x.reshape(-1, WIDTH)
        shares, picked = self.router(rows).softmax(-1).topk(2, dim=-1)
        return F.cross_entropy(self.head(rows + self.stack(rows, picked, shares)), y.reshape(-1))


def packed_difference(gate_up, down, expert_axis):
    """Of losses over three steps from one device's."""
    inner = {"stack.gate_up": gate_up, "stack.down": down, "*": {}}
    plan = Plan({"ep": 2, "tp": 2}, inner, data_axis="ep", expert_axis=expert_axis)
    losses = []
    for spread in (False, True):
        torch.manual_seed(0)
        model, make = Merged(), lambda parameters: torch.optim.SGD(parameters, lr=0.5)
        model, optimizer = parallelize(plan, model, make) if spread else (model, make(model.parameters()))
        found = []
        for _ in range(3):
            loss = model(*data())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        losses.append(found)
    return max(abs(a - b) for a, b in zip(*losses))


COLUMNS = {"tp": Shard(2)}


@pytest.mark.parametrize("expert_axis", ["ep", None])
def test_packed_weights_in_groups_of_columns(expert_axis):
    assert max(run_ranks(4, packed_difference, {"tp": InterleavedShard(1, 2)}, COLUMNS, expert_axis)) < 1e-5


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [
        ({"tp": Shard(1)}, COLUMNS),
        ({"tp": InterleavedShard(1, 2)}, {}),
        ({}, COLUMNS),
        ({"tp": InterleavedShard(1, 2)}, {"tp": Shard(1)}),
        ({"tp": Shard(2)}, {"tp": Shard(2)}),
    ],
    ids=["halves apart", "one alone", "the other alone", "a wrong dim", "both by columns"],
)
def test_experts_cut_where_parts_make_no_sum_are_refused(gate_up, down):
    """Losses were off by 2e-2 without a word, or torch raised about shapes."""
    raises_on_all(4, PlanError, packed_difference, gate_up, down, "ep", match="its experts are split inside")
