"""Parameters that an autograd Function of the user's gives no gradient: none on a mesh either, and no zeros, which
weight decay would act on; and the state of what was frozen all along."""

import pytest
import torch
from torch import nn

from vescale_dtensor import Shard
from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH = 8


class Straight(torch.autograd.Function):
    """x @ w.T, whose backward leaves the weight out."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0], None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.left_out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        h = Straight.apply(self.first(x), self.left_out.weight) + self.left_out.bias
        return self.head(torch.tanh(h)).square().mean()


CUT = {"first.*": {"tp": Shard(0)}, "left_out.weight": {"tp": Shard(1)}, "*": {}}
PLANS = {
    **{f"zero{zero}": Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero) for zero in range(4)},
    "tp": Plan(mesh={"tp": 2}, parameters=CUT),
    "tp, replicated": Plan(mesh={"tp": 2}, parameters={"*": {}}),
}


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def trained(plan):
    """Gradients by step, None where there is none; parameters at the end."""
    torch.manual_seed(0)
    model, make = Net(), lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)
    optimizer = make(model.parameters())
    if plan is not None:
        model, optimizer = parallelize(plan, model, make)
    gradients = []
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(8, WIDTH)).backward()
        gradients.append({n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {n: whole(p) for n, p in model.named_parameters()}


def compared():
    torch.set_default_dtype(torch.float64)
    wanted, different = trained(None), []
    assert wanted[0][0]["left_out.weight"] is None
    for name, plan in PLANS.items():
        found = trained(plan)
        for mine, theirs in zip([*found[0], found[1]], [*wanted[0], wanted[1]], strict=True):
            for n, value in theirs.items():
                alike = mine[n] is value if value is None or mine[n] is None else torch.allclose(mine[n], value)
                different += [] if alike else [(name, n)]
    return different


def test_who_gives_no_gradient_gives_none_on_a_mesh():
    assert run_ranks(2, compared) == [[], []]


def reloaded(zero):
    """Adagrad makes the state of every parameter at once, of frozen ones, too."""
    torch.manual_seed(0)
    model, make = Net(), lambda parameters: torch.optim.Adagrad(parameters, lr=0.1)
    model.first.requires_grad_(False)
    if zero is None:
        optimizer = make(model.parameters())
    else:
        plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero)
        model, optimizer = parallelize(plan, model, make)
    for step in range(4):
        optimizer.load_state_dict(optimizer.state_dict())
        torch.manual_seed(step)
        model(torch.randn(8, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: whole(p) for n, p in model.named_parameters()}


@pytest.mark.parametrize("zero", range(4))
def test_states_of_frozen_parameters_are_loaded_again(zero):
    wanted = reloaded(None)
    for found in run_ranks(2, reloaded, zero):
        torch.testing.assert_close(found, wanted)


def taken(zero):
    """What is shown of a frozen parameter's state, and of it after the state of one device was loaded."""
    torch.manual_seed(0)
    model, make = Net(), lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim < 2)
    given = make(model.parameters()).state_dict()
    for i, entries in given["state"].items():
        entries["sum"] = torch.arange(entries["sum"].numel()).view(entries["sum"].shape) + i / 64
    model, optimizer = parallelize(Plan(mesh={"dp": 3}, parameters={"*": {}}, zero=zero), model, make)
    shown = [whole(optimizer.state[p]["sum"]) for p in model.parameters()]
    optimizer.load_state_dict(given)
    loaded = [whole(optimizer.state[p]["sum"]) for p in model.parameters()]
    for p, one in zip(model.parameters(), loaded):
        optimizer.state[p]["sum"] = one + 1
    put = [whole(optimizer.state[p]["sum"]) for p in model.parameters()]
    same = [
        tuple(p.shape) == tuple(one.shape) and bool((one == 0.5).all()) for p, one in zip(model.parameters(), shown)
    ]
    right = [torch.equal(one, given["state"][i]["sum"]) for i, one in enumerate(loaded)]
    return all(same), all(right), all(torch.equal(one + 1, two) for one, two in zip(loaded, put))


@pytest.mark.parametrize("zero", range(4))
def test_a_frozen_parameters_state_is_shown_loaded_and_put_as_a_trained_ones(zero):
    assert run_ranks(3, taken, zero) == [(True, True, True)] * 3
