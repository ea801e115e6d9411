"""Plain leaves that are trained beside a model, and go through functions before they meet its output: weights of tasks,
classes and centers of metric learning, perturbations. One device's losses and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import PlainTensorError, Shard
from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks, slice_of

ROWS, WIDTH, CLASSES = 8, 6, 5


def uncertainty(net, of, x, t):
    out = net(x)
    scale = torch.exp(-of["tasks"])
    return scale[0] * out.square().mean() + scale[1] * F.cross_entropy(out, t) + of["tasks"].sum()


def stacked_uncertainty(net, of, x, t):
    out = net(x)
    losses = torch.stack([out.square().mean(), F.cross_entropy(out, t)])
    return (losses * torch.exp(-of["tasks"]) + of["tasks"]).sum()


def angular_margin(net, of, x, t):
    cosine = F.linear(F.normalize(net(x)), F.normalize(of["classes"])).clamp(-1 + 1e-6, 1 - 1e-6)
    margin = torch.cos(torch.acos(cosine) + 0.3)
    return F.cross_entropy(torch.where(F.one_hot(t, CLASSES).bool(), margin, cosine) * of["scale"].exp(), t)


def centers(net, of, x, t):
    return (net(x) - of["classes"][t]).square().sum() / 2


def prototypes(net, of, x, t):
    out = net(x)
    nearest = of["classes"][out.argmax(1)]
    return F.cross_entropy(-torch.cdist(out, F.normalize(of["classes"])), t) + (out - nearest).square().mean()


def perturbed(net, of, x, t):
    return F.cross_entropy(net(x + torch.tanh(of["delta"])), t) + 0.1 * of["delta"].norm()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def of_a_function(net, of, x, t):
    return (net(x) * Square.apply(of["scale"])).square().mean()


def written(net, of, x, t):
    """In place, either of the two."""
    out = net(x) * 1
    mixed = of["classes"] * 2
    mixed[0] = out[0]
    out[1] = of["classes"][1].exp()
    out.mul_(of["scale"].exp())
    return mixed.square().sum() + out.square().mean()


def checkpointed(net, of, x, t):
    def similar(out, classes):
        return F.linear(F.normalize(out), F.normalize(classes)).square().sum()

    return checkpoint(similar, net(x), of["classes"] * 2, use_reentrant=False)


def second_order(net, of, x, t):
    loss = (net(x) @ F.normalize(of["classes"])).square().mean()
    (gradient,) = torch.autograd.grad(loss, of["classes"], create_graph=True)
    return loss + gradient.square().sum()


def retained(net, of, x, t):
    loss = (net(x) @ of["classes"].softmax(1)).square().mean()
    (loss * 0.5).backward(retain_graph=True)
    return loss


def of_a_module(net, of, x, t):
    torch.manual_seed(1)
    head = nn.Sequential(nn.Linear(CLASSES, 4), nn.ReLU(), nn.Linear(4, 2))
    found = head(of["classes"])
    return (net(x) @ found.abs().sum(1)).square().mean() + found.sum()


LOSSES = (
    uncertainty, stacked_uncertainty, angular_margin, centers, prototypes, perturbed, of_a_function, written,
    checkpointed, second_order, retained, of_a_module,
)  # fmt: skip
TP = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "*": {}}
PLANS = {
    "dp": Plan(mesh={"dp": 2}, parameters={"*": {}}),
    "zero3": Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3),
    "tp": Plan(mesh={"tp": 2}, parameters=TP),
    "dp2 x tp2, zero3": Plan(mesh={"dp": 2, "tp": 2}, parameters=TP, zero=3),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, CLASSES))


def values(tensor):
    return None if tensor is None else tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def trained(plan, loss_of):
    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    model = net()
    model, optimizer = (model, make(model.parameters())) if plan is None else parallelize(plan, model, make)
    torch.manual_seed(9)
    leaves = {
        "tasks": torch.full((2,), 0.1), "classes": torch.randn(CLASSES, CLASSES), "scale": torch.tensor(0.5),
        "delta": torch.randn(ROWS, WIDTH) * 0.1,
    }  # fmt: skip
    theirs = torch.optim.Adam([leaf.requires_grad_() for leaf in leaves.values()], lr=0.05)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        loss = loss_of(model, leaves, torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,)))
        loss.backward()
        found += [loss.detach(), *(leaf.grad for leaf in leaves.values()), *(p.grad for p in model.parameters())]
        found = list(map(values, found))
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
    return found


def compared(plan):
    for loss_of in LOSSES:
        wanted, got = trained(None, loss_of), trained(plan, loss_of)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(
                one, other, atol=1e-4, rtol=1e-4, msg=lambda text, of=loss_of: f"{of.__name__} {text}"
            )


@pytest.mark.parametrize("plan", slice_of(list(PLANS), 2))
def test_leaves_beside_a_model(plan):
    run_ranks(PLANS[plan].world_size, compared, PLANS[plan])


def lost(plan):
    """A rank's part is none of them, wherever it goes."""
    model, _ = parallelize(plan, net(), None)
    out, scale = model(torch.ones(ROWS, WIDTH)), torch.ones(CLASSES, requires_grad=True)
    part = (out.to_local() * scale).sum()
    for use in (part, part * 2 + scale.sum(), torch.stack([scale.sum(), part]).sum()):
        with pytest.raises(PlainTensorError, match="lost its layout"):
            out.sum() + use


def test_a_rank_s_part_is_refused_behind_plain_functions():
    run_ranks(2, lost, PLANS["dp"])
