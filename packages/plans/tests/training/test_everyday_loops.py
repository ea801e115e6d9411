"""Loops that write parameters in a forward, go through a graph again and again, or hook steps, at each ZeRO stage."""

import copy

import pytest
import torch
from torch import nn

from vescale_dtensor import comm_trace
from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks

STEPS = 3


class MomentumContrast(nn.Module):
    """A frozen encoder follows a trained one, as MoCo's own code writes it: by `.data`, in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x)
        with torch.no_grad():
            for trained, follows in zip(self.query.parameters(), self.key.parameters()):
                follows.data = follows.data * 0.9 + trained.data * 0.1
            key = self.key(x * 1.1)
        return (query * key).sum() / len(x)


def sgd(parameters):
    return torch.optim.SGD([one for one in parameters if one.requires_grad], lr=0.1, momentum=0.9)


def contrast(zero: int | None):
    torch.manual_seed(0)
    model = MomentumContrast()
    if zero is None:
        optimizer = sgd(model.parameters())
    else:
        model, optimizer = parallelize(Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero), model, sgd)
    losses = []
    for step in range(STEPS):
        loss = model(torch.randn(8, 8, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [(getattr(one, "full_tensor", one.clone)()).detach() for one in model.parameters()]


def curvature(zero: int | None):
    """The largest eigenvalue of the Hessian by power iteration, then a step as ever."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if zero is None:
        optimizer = sgd(model.parameters())
    else:
        model, optimizer = parallelize(Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero), model, sgd)
    inputs, found = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), []
    parameters = list(model.parameters())
    for _ in range(2):
        loss = model(inputs).square().mean()
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        directions = [torch.ones_like(one) for one in parameters]
        for _ in range(3):
            along = sum((slope * one).sum() for slope, one in zip(slopes, directions))
            products = torch.autograd.grad(along, parameters, retain_graph=True)
            norm = sum(one.square().sum() for one in products).sqrt()
            directions = [one / norm for one in products]
            found.append(norm.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        parameters[0].mul_(0.5)  # the parameters are at rest again: a write stays
        found.append(model(inputs).sum().item())
    return found, [(getattr(one, "full_tensor", one.clone)()).detach() for one in parameters]


def hooked(zero: int | None):
    """A step's hooks see what one device's would: gradients to clip before, parameters to measure after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if zero is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    else:
        plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero)
        model, optimizer = parallelize(plan, model, lambda given: torch.optim.AdamW(given, lr=0.1))
    found: list[float] = []

    def before(optimizer, args, kwargs):
        held = [one for group in optimizer.param_groups for one in group["params"]]
        found.append(nn.utils.clip_grad_norm_(held, 0.01).item())

    def after(optimizer, args, kwargs):
        held = [one for group in optimizer.param_groups for one in group["params"]]
        found.append(sum(one.detach().square().sum() for one in held).item())

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(STEPS):
        loss = model(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert len(found) == 2 * STEPS
    return found, [(getattr(one, "full_tensor", one.clone)()).detach() for one in model.parameters()]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("program", [contrast, curvature, hooked])
def test_one_devices_numbers(program, zero: int) -> None:
    numbers, values = program(None)
    for found, parameters in run_ranks(2, program, zero):
        assert found == pytest.approx(numbers, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(parameters, values)


def failed_backward():
    """Collectives of another model's backward, before and after one that failed."""
    plan = Plan(mesh={"dp": 2}, parameters={"*": {}})
    first, second = (parallelize(plan, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))[0] for _ in range(2))

    def backward(model):
        with comm_trace() as trace:
            model(torch.ones(4, 4)).square().sum().backward()
        return len(trace.events)

    def fail(gradient):
        raise ValueError("of the user")

    before = backward(second)
    handle = first[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="of the user"):
        backward(first)
    handle.remove()
    after = backward(second)
    first.zero_grad()
    backward(first)
    return before, after, first[1].weight.grad.full_tensor()


def test_a_backward_that_failed_is_not_ended_by_another_models():
    for before, after, _ in run_ranks(2, failed_backward):
        assert before == after > 0
