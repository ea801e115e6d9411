"""Losses of what a forward left elsewhere than in its return value, under ZeRO-3: gradients are those of one device."""

import collections
import types

import pytest
import torch
from torch import nn

from vescale_dtensor import Shard
from vescale_plans import Plan, Precision, parallelize
from vescale_testkit import run_ranks, warm_up

warm_up("vescale_plans")

HIDDEN, ROWS, BLOCKS, STEPS = 6, 8, 3, 3


class Slots:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


# How a forward's value is handed on -> how the loop finds it.
WAYS = {
    "closure": (lambda value: lambda: value, lambda left: left()),
    "iterator": (lambda value: iter([value]), next),
    "deque": (lambda value: collections.deque([value]), lambda left: left[0]),
    "slots": (Slots, lambda left: left.held),
    "namespace": (lambda value: types.SimpleNamespace(held=[value]), lambda left: left.held[0]),
    "distribution": (lambda value: torch.distributions.Normal(value, 1.0), lambda left: left.mean),
    "itself": (lambda value: value, lambda left: left),
}


class Block(nn.Module):
    """Leaves on itself what it computed from its result."""

    def __init__(self, frozen):
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)
        self.scale = nn.Parameter(torch.randn(HIDDEN), requires_grad=not frozen)
        self.outer = nn.Parameter(torch.randn(4, HIDDEN), requires_grad=not frozen)  # broadcasts as its own part does

    def forward(self, x):
        inner = torch.tanh(self.up(x)) * self.scale
        out = x + inner
        self.before, self.after = inner.square().mean(), ((out[:, None] * self.outer).tanh() @ self.up.weight)
        return out


class Model(nn.Module):
    def __init__(self, way, frozen):
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Block(frozen) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.gates = nn.Parameter(torch.randn(2, HIDDEN), requires_grad=not frozen)
        self.way = way

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        self.features = self.norm(x)
        return WAYS[self.way][0]((self.features[:, None] * self.gates).sin())


class Handing(nn.Module):
    """The second block computes with what the first left, and the first one's result goes nowhere."""

    def __init__(self, way, frozen):
        super().__init__()
        self.blocks = nn.ModuleList(Block(frozen) for _ in range(2))
        self.way = way

    def forward(self, x):
        self.blocks[0](x)
        out = self.blocks[1](x + self.blocks[0].after.mean(1) + self.blocks[0].before)
        return WAYS[self.way][0](out)


def loss_of_hooked(model, out, seen):
    return sum(one.square().mean() for one in seen)


# What the loss is computed of: the model, what its call gave, outputs of `up` that hooks of the blocks saw.
LOSSES = {
    "result": lambda model, out, seen: out.square().mean(),
    "attribute": lambda model, out, seen: model.features.square().mean(),
    "result and attribute": lambda model, out, seen: out.mean() + model.features.square().mean(),
    "blocks alone": lambda model, out, seen: sum(block.after.mean() for block in model.blocks),
    "one block": lambda model, out, seen: model.blocks[1].after.mean() + model.blocks[0].before,
    "result and blocks": lambda model, out, seen: out.square().mean() + sum(b.after.mean() for b in model.blocks),
    "hooked": loss_of_hooked,
    "plain": lambda model, out, seen: (whole(out).square().mean() + whole(model.features)[0].sum()) / 2,
    "plain, of a block": lambda model, out, seen: whole(model.blocks[2].after).square().mean(),
}  # fmt: skip


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def trained(plan, way, loss, frozen=False, build=Model, how="backward"):
    """Parameters after a few steps, and the first gradients."""
    torch.manual_seed(0)
    model = build(way, frozen).double()
    batches = torch.randn(STEPS, ROWS, HIDDEN, dtype=torch.float64)

    def sgd(parameters):
        return torch.optim.SGD([one for one in parameters if one.requires_grad], lr=0.1)

    optimizer = sgd(model.parameters())
    if plan is not None:
        model, optimizer = parallelize(plan, model, sgd)
    seen = []
    for block in model.blocks:
        block.up.register_forward_hook(lambda module, args, out: seen.append(out))
    for batch in batches:
        seen.clear()
        found = LOSSES[loss](model, WAYS[way][1](model(batch)), seen)
        if how == "twice":
            found.backward(retain_graph=True)
        if how == "grad":
            used = [one for one in model.parameters() if one.requires_grad]
            for one, gradient in zip(used, torch.autograd.grad(found, used, allow_unused=True)):
                one.grad = gradient
        else:
            found.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(one.detach()) for name, one in model.named_parameters()}


def apart(plan, cases):
    """The cases whose parameters are not those of one device, with the largest relative error. Runs on every rank."""
    found = {}
    for case in cases:
        expected, got = trained(None, **case), trained(plan, **case)
        worst = max(((got[name] - one).norm() / one.norm()).item() for name, one in expected.items())
        if not worst < 1e-12:
            found[tuple(case.values())] = worst
    return found


ZERO3 = Plan({"dp": 2}, {"*": {}}, zero=3)
TWO_AXES = Plan({"dp": 2, "tp": 2}, {"*.up.weight": {"tp": Shard(0)}, "*.up.bias": {"tp": Shard(0)}, "*": {}}, zero=3)


@pytest.mark.parametrize("frozen", [False, True])
def test_whatever_a_loss_is_computed_of(frozen):
    cases = [{"way": "itself", "loss": loss, "frozen": frozen} for loss in LOSSES]
    assert run_ranks(2, apart, ZERO3, cases) == [{}, {}]


def test_whatever_hands_it_on():
    cases = [{"way": way, "loss": loss} for way in WAYS for loss in ("result", "result and blocks")]
    assert run_ranks(2, apart, ZERO3, cases) == [{}, {}]


@pytest.mark.parametrize("how", ["twice", "grad"])
def test_however_it_is_run(how):
    cases = [{"way": "closure", "loss": loss, "how": how} for loss in ("result", "attribute", "blocks alone")]
    assert run_ranks(2, apart, ZERO3, cases) == [{}, {}]


@pytest.mark.parametrize("frozen", [False, True])
def test_what_blocks_hand_each_other_past_their_results(frozen):
    cases = [
        {"way": "closure", "loss": loss, "frozen": frozen, "build": Handing} for loss in ("result", "blocks alone")
    ]
    assert run_ranks(2, apart, ZERO3, cases) == [{}, {}]


def test_beside_tensor_parallelism():
    cases = [{"way": "namespace", "loss": loss} for loss in ("result", "result and blocks", "hooked", "plain")]
    assert run_ranks(4, apart, TWO_AXES, cases) == [{}] * 4


def of_reduced_precision():
    """Under ZeRO 0 and 3 with parameters cast for the forward: alike to the bit, for the sums are."""
    made = {}
    for zero in (0, 3):
        plan = Plan({"dp": 2}, {"*": {}}, zero=zero, precision=Precision(torch.float32))
        made[zero] = trained(plan, "closure", "result and blocks")
    return [name for name, one in made[0].items() if not torch.equal(one, made[3][name])]


def test_in_reduced_precision():
    assert run_ranks(2, of_reduced_precision) == [[], []]
