"""Plain tensors that users make beside a parallelized model: filled with what it computes, or asked for their gradient.
One device's losses and parameters, in the loop and inside of a forward."""

import copy
import itertools

import pytest
import torch
from torch import nn

from vescale_dtensor import DTensor, PlainTensorError, Replicate, Shard
from vescale_plans import Boundary, Plan, parallelize
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, ROWS = 8, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


# --- losses: of a model that is called, and a plain batch ------------------------------------------------------------


def penalty(net, x):
    x = x.clone().requires_grad_()
    out = net(x).sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    return out * 0.01 + (gradient.norm(dim=1) - 1).square().mean()


def penalty_between(net, x):
    """As Wasserstein critics are trained."""
    share = torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(5))
    between = (share * x + (1 - share) * x.flip(0)).requires_grad_(True)
    out = net(between)
    gradient = torch.autograd.grad(
        outputs=out, inputs=between, grad_outputs=torch.ones(out.size()), create_graph=True, only_inputs=True
    )[0]
    gradient = gradient.view(gradient.size(0), -1)
    return net(x).mean() + 10 * ((gradient.norm(2, dim=1) - 1) ** 2).mean()


def second_order(net, x):
    x = x.clone().requires_grad_()
    first = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), x, create_graph=True)[0]
    return second.square().sum() + first.sum()


def attack(net, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x)
    assert type(gradient) is torch.Tensor  # without a graph it is as plain as x
    return net(x.detach() + 0.1 * gradient.sign()).square().mean()


def rows(net, x):
    out, filled = net(x), torch.zeros(ROWS, 1)
    for i in range(ROWS):
        filled[i] = out[i] * i
    return filled.square().mean()


def slices(net, x):
    out, filled = net(x), torch.zeros(5, 3)
    filled[1:, 1], filled[0] = out[:, 0], out.sum()
    filled[..., 2:] = out.mean()
    return (filled * torch.arange(15.0).view(5, 3)).sum()


def masks(net, x):
    out, filled = net(x), x.new_zeros(ROWS, 2)
    filled[:, 0:1] = out
    filled[out[:, 0] > 0, 1] = 1.0
    kept = torch.tensor([True, False, True, False])
    filled[kept] = filled[kept] + out[kept]
    return filled.square().sum() + out.sum()


def through_views(net, x):
    out, filled = net(x), torch.zeros(ROWS, 3)
    filled[0][1] = out[0, 0]
    filled.view(-1)[6:8] = out[:2, 0]
    filled.t()[2].copy_(out[:, 0])
    filled.select(1, 0).add_(out[:, 0])
    return filled.square().sum()


def added(net, x):
    out, total = net(x), torch.zeros(ROWS, 1)
    total += out
    total.add_(out).mul_(2).addcmul_(out, out, value=0.3)
    return total.sum()


def indexed(net, x):
    out, filled = net(x), torch.zeros(6, 1)
    filled.index_add_(0, torch.tensor([0, 2, 2, 5]), out)
    filled.scatter_add_(0, torch.tensor([[0], [1], [0], [1]]), out)
    filled.index_copy_(0, torch.tensor([4]), out[:1])
    filled.index_put_((torch.tensor([3]),), out[1:2])
    filled.masked_scatter_(torch.tensor([[True], *[[False]] * 5]), out)
    return filled.square().sum()


def routed(net, x):
    """Experts as many models write them: rows are picked, and added into zeros."""
    hidden = torch.tanh(net.up(x))
    filled = torch.zeros(ROWS, 16)
    for expert in range(3):
        picked = torch.where(hidden[:, expert] > 0)[0]
        filled.index_add_(0, picked, hidden[picked] * (expert + 1))
    return net.down(filled).square().mean()


def without_gradient(net, x):
    out, plain = net(x), torch.zeros(ROWS, 1)
    with torch.no_grad():
        plain[1:] = out[1:]
        plain[0] = out.sum()
        again = torch.zeros(ROWS, 1)
        torch.mul(out, 2, out=again)
    assert type(plain) is type(again) is torch.Tensor  # holds the numbers, and stays what it was
    return (out * plain * again).sum()


LOSSES = (
    penalty, penalty_between, second_order, attack, rows, slices, masks, through_views, added, indexed, routed,
    without_gradient,
)  # fmt: skip


class Inside(nn.Module):
    """The loss is the model's own."""

    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x):
        return self.loss(self.net, x)


TP = {
    "parameters": {"*up.*": {"tp": Shard(0)}, "*down.weight": {"tp": Shard(1)}, "*": {}},
    "boundaries": {"*down": Boundary(output={"tp": Replicate()})},
}
PLANS = {
    "dp": Plan(mesh={"dp": 2}, parameters={"*": {}}),
    "zero2": Plan(mesh={"dp": 2}, zero=2, parameters={"*": {}}),
    "zero3": Plan(mesh={"dp": 2}, zero=3, parameters={"*": {}}),
    "tp": Plan(mesh={"tp": 2}, **TP),
    "dp2 x tp2, zero3": Plan(mesh={"dp": 2, "tp": 2}, zero=3, **TP),
}


def trained(model, loss_of, plan=None):
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    optimizer = make(model.parameters())
    if plan is not None:
        model, optimizer = parallelize(plan, model, make)
    losses = []
    for step in range(3):
        loss = loss_of(model, torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach() for p in model.parameters()]


def run(plan, inside):
    for loss in LOSSES:
        if loss is attack and inside:  # the batch is no plain tensor there
            continue
        torch.manual_seed(0)
        alone = Inside(Net(), loss) if inside else Net()
        loss_of = (lambda model, x: model(x)) if inside else loss
        model = copy.deepcopy(alone)
        try:
            wanted, got = trained(alone, loss_of), trained(model, loss_of, plan)
        except Exception as error:
            error.add_note(loss.__name__)
            raise
        assert got[0] == pytest.approx(wanted[0], rel=1e-4, abs=1e-6), loss.__name__
        for one, other in zip(wanted[1], got[1], strict=True):
            apart = (one - other.full_tensor()).norm()
            assert apart <= 1e-5 * one.norm() + 1e-6, f"{loss.__name__}: {apart:.2g} apart"


@pytest.mark.parametrize(
    ("plan", "inside"), slice_of(itertools.product(PLANS, (False, True)), 3)
)
def test_plain_tensors_beside_a_model(plan, inside):
    run_ranks(PLANS[plan].world_size, run, PLANS[plan], inside, timeout=180.0)


def _views():
    """What else looks at memory that a gradient was written to has no layout, and says so."""
    net, _ = parallelize(PLANS["dp"], Net())
    filled = torch.zeros(ROWS, 1)
    view = filled[1:]
    filled[0] = net(torch.ones(ROWS, WIDTH))[0]
    assert type(filled) is DTensor
    with pytest.raises(PlainTensorError, match="lost its layout"):
        view + net(torch.ones(ROWS, WIDTH))[1:]


def test_a_view_from_before_is_refused():
    run_ranks(2, _views)
