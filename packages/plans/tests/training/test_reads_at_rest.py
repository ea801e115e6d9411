"""Parameters read with gradient where they rest as parts, beside the model's own use: penalties, ties, vectors."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from vescale_dtensor import Replicate, Shard, comm_trace
from vescale_plans import Plan, Precision, no_sync, parallelize
from vescale_testkit import run_ranks, slice_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def squares(model, x):
    return sum(p.square().sum() for p in model.parameters())


def one_of_them(model, x):
    return model.blocks[0][0].weight.abs().sum() + model.head.bias.sum()


def used_again(model, x):
    return F.linear(x, model.blocks[1][0].weight, model.blocks[0][0].bias).square().mean()


def as_vector(model, x):
    return nn.utils.parameters_to_vector(model.parameters()).square().mean()


def as_whole(model, x):
    weight = model.head.weight
    return weight.redistribute([Replicate()] * weight.device_mesh.ndim).square().sum()


def of_norms(model, x):
    return torch.stack([p.norm() for p in model.parameters()]).sum()


def orthogonal(model, x):
    weight = model.blocks[0][0].weight
    return (weight @ weight.T - torch.eye(6)).square().sum()


def squared_gradient(model, x):
    weight = model.head.weight
    (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    return gradient.square().sum()


PENALTIES = [squares, one_of_them, used_again, as_vector, as_whole, of_norms, orthogonal, squared_gradient]
COLUMNS = {"*blocks.*.weight": {"tp": Shard(0)}, "*blocks.*.bias": {"tp": Shard(0)}, "*": {}}
PLANS = {
    "zero3": Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3),
    "zero3 checkpointed": Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, checkpointing={"blocks.*": True}),
    "zero2 precision": Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=2, precision=Precision(torch.float32)),
    "zero3 hybrid": Plan(mesh={"out": 2, "dp": 2}, parameters={"*": {}}, zero=3, data_axis=("out", "dp")),
    "zero3 tp": Plan(mesh={"dp": 2, "tp": 2}, parameters=COLUMNS, zero=3),
    "zero1": Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=1),
}
WHEN = ["before", "after", "alone", "accumulated"]
CASES = [(plan, penalty, when) for plan in PLANS for penalty in PENALTIES for when in WHEN]


def train(plan, penalty, when):
    torch.manual_seed(0)
    model = Net()
    model, optimizer = parallelize(plan, model, lambda given: torch.optim.AdamW(given, lr=0.05))
    seen = []
    for step in range(3):
        torch.manual_seed(step)
        parts = torch.randn(2, 4, 6).unbind()
        for i, x in enumerate(parts if when == "accumulated" else parts[:1]):
            if when == "accumulated" and i == 0:
                with no_sync(model):
                    (model(x).square().mean() + 0.1 * penalty(model, x)).backward()
                continue
            loss = 0.1 * penalty(model, x) if when != "after" else 0.0
            if when != "alone" or step == 0:
                loss = loss + model(x).square().mean()
            if when == "after":
                loss = loss + 0.1 * penalty(model, x)
            loss.backward()
            seen.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return seen, [p.detach().full_tensor() for p in model.parameters()]


def alone(penalty, when):
    return run_ranks(1, train, Plan(mesh={}, parameters={"*": {}}), penalty, when)[0]


@pytest.mark.parametrize(
    ("plan", "penalty", "when"), slice_of(CASES, 12), ids=lambda value: getattr(value, "__name__", value)
)
def test_against_one_device(plan, penalty, when):
    losses, parameters = alone(penalty, when)
    ranks = torch.Size(PLANS[plan].mesh.values()).numel()
    for got, trained in run_ranks(ranks, train, PLANS[plan], penalty, when):
        assert got == pytest.approx(losses, abs=1e-5)
        for ours, wanted in zip(trained, parameters, strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


def read_between(plan):
    """Of a model all of whose parameters are its blocks': read after a forward, which is followed by another one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    model, optimizer = parallelize(plan, model, lambda given: torch.optim.SGD(given, lr=0.05))
    seen = []
    for step in range(3):
        torch.manual_seed(step)
        first, second = torch.randn(2, 4, 6).unbind()
        loss = model(first).square().mean()
        halves = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
        loss = loss + functional_call(model, halves, (second,)).square().mean()
        if step == 1:
            loss = functional_call(model, halves, (second,)).sum()
        loss.backward()
        seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return seen, [p.detach().full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("plan", ["zero3", "zero2 precision", "zero3 hybrid", "zero1"])
def test_parameters_of_blocks_rest_between_two_forwards(plan):
    losses, parameters = run_ranks(1, read_between, Plan(mesh={}, parameters={"*": {}}))[0]
    for got, trained in run_ranks(torch.Size(PLANS[plan].mesh.values()).numel(), read_between, PLANS[plan]):
        assert got == pytest.approx(losses, abs=1e-5)
        for ours, wanted in zip(trained, parameters, strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


def moved(plan):
    """Collectives of a penalty alone, both ways."""
    model, _ = parallelize(plan, Net(), None)
    with comm_trace() as trace:
        loss = model.blocks[0][0].weight.square()
    return trace.count(), loss.to_local().numel()


def test_elementwise_functions_stay_on_the_parts():
    for count, numel in run_ranks(2, moved, PLANS["zero3"]):
        assert count == 0
        assert numel < 36


class Within(nn.Module):
    """Computes the penalty in its forward: at a place among the blocks, of which the last ends it, or a head does."""

    def __init__(self, penalty, place, has_head, width=6):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 3) if has_head else None
        self.penalty, self.place = penalty, place

    def forward(self, x):
        found = 0.0
        for place, block in enumerate(self.blocks):
            found = found + self.penalty(self.blocks, x) if place == self.place else found
            x = block(x).tanh()
        found = found + self.penalty(self.blocks, x) if self.place == len(self.blocks) else found
        x = x if self.head is None else self.head(x)
        return x.square().mean() + 0.1 * found


WITHIN = {
    "biases": lambda blocks, x: sum(block.bias.square().sum() for block in blocks),
    "weights": lambda blocks, x: sum(block.weight.square().sum() for block in blocks),
    "the last, again": lambda blocks, x: F.linear(x, blocks[-1].weight, blocks[-1].bias).exp().mean(),
    "the last, detached": lambda blocks, x: (x @ blocks[-1].weight.detach()).square().mean(),
    "norms": lambda blocks, x: torch.stack([p.norm() for p in blocks.parameters()]).sum(),
    "a view": lambda blocks, x: blocks[-1].weight[1:].square().sum() + blocks[-1].bias.view(-1, 1).exp().sum(),
    "a vector": lambda blocks, x: nn.utils.parameters_to_vector(blocks.parameters()).square().mean(),
}


def train_within(plan, width=6):
    found = {}
    for name, penalty in WITHIN.items():
        for place in range(4):
            for has_head in (False, True):
                torch.manual_seed(0)
                model = Within(penalty, place, has_head, width)
                model, optimizer = parallelize(plan, model, lambda given: torch.optim.SGD(given, lr=0.1))
                seen = []
                for _ in range(3):
                    loss = model(torch.randn(4, width))
                    loss.backward()
                    seen += [loss.item(), *(p.grad.full_tensor() for p in model.parameters())]
                    optimizer.step()
                    optimizer.zero_grad()
                found[name, place, has_head] = seen
    return found


# Of width 2 a rank has one number of a bias, which would broadcast.
@pytest.mark.parametrize(
    ("plan", "width"),
    slice_of(list(product(("zero3", "zero3 checkpointed", "zero2 precision", "zero3 hybrid", "zero3 tp"), (6, 2))), 3),
)
def test_a_forward_reads_parameters_of_blocks_outside_of_them(plan, width):
    wanted = run_ranks(1, train_within, Plan(mesh={}, parameters={"*": {}}), width)[0]
    for found in run_ranks(torch.Size(PLANS[plan].mesh.values()).numel(), train_within, PLANS[plan], width):
        for case, seen in wanted.items():
            for ours, theirs in zip(found[case], seen, strict=True):
                torch.testing.assert_close(
                    ours, theirs, atol=1e-5, rtol=1e-5, msg=lambda text, case=case: f"{case} {text}"
                )
