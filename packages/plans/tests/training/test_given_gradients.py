"""Gradients that are given: over memory that somebody else holds, as one tensor for two parameters."""

import pytest
import torch
from torch import nn

from vescale_dtensor import GradientError, Shard
from vescale_plans import Plan, parallelize
from vescale_testkit import raises_on_all, run_ranks

TP = {"0.*": {"tp": Shard(0)}, "1.weight": {"tp": Shard(1)}, "*": {}}
PLANS = {
    "one rank": Plan(mesh={"dp": 1}, parameters={"*": {}}),
    "data": Plan(mesh={"dp": 2}, parameters={"*": {}}),
    "zero 3": Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3),
    "tensor": Plan(mesh={"tp": 2}, parameters=TP),
}


def loss_of(model, seed):
    return model(torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))).square().mean()


def made(plan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (model, optimizer) if plan is None else parallelize(plan, model, optimizer)


def whole(tensor):
    return getattr(tensor, "full_tensor", tensor.clone)().detach().clone()


def into_a_buffer(plan):
    """A flat buffer is cleared, filled by backwards, and clipped where it lies."""
    model, optimizer = made(plan)
    buffer, at = torch.zeros(sum(one.numel() for one in model.parameters())), 0
    for one in model.parameters():
        one.grad = buffer[at : at + one.numel()].view(one.shape)
        at += one.numel()
    found = []
    for seed in range(3):
        buffer.zero_()
        for part in range(2):
            loss_of(model, 2 * seed + part).backward()
        found.append(buffer.clone())
        buffer.clamp_(-0.01, 0.01)
        optimizer.step()
    return [*found, *map(whole, model.parameters())]


def projected(plan):
    """Gradients of two losses, as one flat vector that goes on to be held, and others that nobody holds (PCGrad)."""
    model, optimizer = made(plan)
    parameters, found = list(model.parameters()), []
    for seed in range(3):
        flat = []
        for part in range(2):
            loss_of(model, seed + part).backward()
            flat.append(torch.cat([whole(one.grad).flatten() for one in parameters]))
            optimizer.zero_grad()
        mixed = flat[0] - (flat[0] @ flat[1]) / flat[1].square().sum() * flat[1]
        for one, part in zip(parameters, mixed.split([one.numel() for one in parameters])):
            one.grad = part.view(one.shape)
        found.append(nn.utils.clip_grad_norm_(parameters, 0.01).item())
        optimizer.step()
        for one in parameters:
            one.grad = torch.ones(one.shape)  # nobody else holds it
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.tensor(found), *map(whole, parameters)]


def one_for_two(plan):
    model, _ = made(plan)
    loss_of(model, 0).backward()
    first, second = model[0].weight, model[1].weight
    second.grad = first.grad
    second.grad.mul_(2)
    found = [whole(first.grad)]
    second.grad = first.grad.clone()
    second.grad.mul_(2)
    return [*found, whole(first.grad), whole(second.grad)]


@pytest.mark.parametrize(
    "program, plans",
    [
        (into_a_buffer, ("one rank", "data")),
        (projected, tuple(PLANS)),
        (one_for_two, ("one rank", "data", "zero 3")),
    ],
)
def test_one_devices_numbers(program, plans):
    expected = program(None)
    for name in plans:
        ranks = 1 if name == "one rank" else 2
        for found in run_ranks(ranks, program, PLANS[name]):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "program, name, rule",
    [
        (into_a_buffer, "zero 3", "it would add to a gradient that was given as a plain tensor"),
        (into_a_buffer, "tensor", "it would add to a gradient that was given as a plain tensor"),
        (one_for_two, "tensor", "the gradient of another tensor is given, which lies otherwise"),
    ],
)
def test_what_cannot_be_one_memory_is_refused(program, name, rule):
    raises_on_all(2, GradientError, program, PLANS[name], match=rule)
