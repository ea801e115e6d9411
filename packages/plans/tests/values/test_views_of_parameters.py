"""A view of a parameter that somebody keeps: read later it is one device's, or a ViewError, never old values or memory
that was freed."""

import pytest
import torch
from torch import nn

from vescale_dtensor import Shard, ViewError
from vescale_plans import Plan, Precision, parallelize
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("vescale_plans")

ROWS, COLUMNS, CLOSE = 33, 16, 1e-5
VIEWS = {
    "[0]": lambda w: w[0],
    "[1:3]": lambda w: w[1:3],
    "[:, 0]": lambda w: w[:, 0],
    "[..., None]": lambda w: w[..., None],
    "[0, 0]": lambda w: w[0, 0],
    "a view of a view": lambda w: w[2:20][3][2:5],
    "a view of an alias": lambda w: w.detach()[5],
    "of data": lambda w: w.data[0],
    "view of data": lambda w: w.data.view(-1),
    "itself, detached": lambda w: w.detach(),
    "data": lambda w: w.data,
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "transpose": lambda w: torch.transpose(w, 0, 1),
    "permute": lambda w: w.permute(1, 0),
    "view": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(3, 11, 16),
    "flatten": lambda w: w.flatten(),
    "unflatten": lambda w: w.unflatten(0, (3, 11)),
    "split": lambda w: w.split(11)[1],
    "tensor_split": lambda w: w.tensor_split(4)[2],
    "chunk": lambda w: w.chunk(3)[0],
    "unbind": lambda w: w.unbind(0)[5],
    "narrow": lambda w: w.narrow(0, 3, 9),
    "select": lambda w: w.select(1, 7),
    "expand": lambda w: w.unsqueeze(0).expand(2, -1, -1),
    "expand_as": lambda w: w[:1].expand_as(w),
    "broadcast_to": lambda w: torch.broadcast_to(w, (2, ROWS, COLUMNS)),
    "diagonal": lambda w: w.diagonal(),
    "unfold": lambda w: w.unfold(0, 4, 2),
    "movedim": lambda w: w.movedim(0, 1),
    "squeeze": lambda w: w[:1].squeeze(0),
    "atleast_3d": lambda w: torch.atleast_3d(w),
    "view_as": lambda w: w.view_as(w),
    "swapaxes": lambda w: w.swapaxes(0, 1),
}
TP = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "*": {}}
PLANS = {
    **{f"zero {zero}": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": zero} for zero in range(4)},
    "tp": {"mesh": {"tp": 2}, "parameters": TP},
    "tp, zero 2": {"mesh": {"dp": 2, "tp": 2}, "parameters": TP, "zero": 2},
    "tp, zero 3": {"mesh": {"dp": 2, "tp": 2}, "parameters": TP, "zero": 3},
}
FOLLOWS = ("zero 0", "zero 1", "zero 2")  # a parameter lies whole on each rank, in one place


class Kept(nn.Linear):
    """Keeps a view of its weight when it runs."""

    take = None
    kept = None

    def forward(self, x):
        if self.take is not None:
            self.kept = self.take(self.weight)
        return super().forward(x)


def net():
    torch.manual_seed(0)
    return nn.Sequential(Kept(COLUMNS, ROWS), nn.Tanh(), nn.Linear(ROWS, 7))


def made(plan):
    model = net()
    if plan is None:
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    return parallelize(Plan(**plan), model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def read(view):
    """What a view shows, or how it says that it does not."""
    with torch.no_grad():
        try:
            return (view.double().abs() * torch.arange(1, view.shape[-1] + 1 if view.ndim else 2)).sum().item()
        except ViewError:
            return ViewError


def readings(plan, take, when, grads=True):
    """What the view shows once it is taken, after a forward, a backward, a step, and a second forward."""
    model, optimizer = made(plan)
    x = torch.arange(4.0 * COLUMNS).view(4, COLUMNS) / 64

    def loss():
        return model(x).square().sum()

    loss().backward()  # so that what there is of state is there
    optimizer.step()
    optimizer.zero_grad()
    out = []
    if when == "at rest":
        with torch.set_grad_enabled(grads):
            kept = take(model[0].weight)
        out.append(read(kept))
    else:
        model[0].take = take
    found = loss()
    if when != "at rest":
        kept, model[0].take = model[0].kept, None
    out.append(read(kept))
    found.backward()
    out.append(read(kept))
    optimizer.step()
    optimizer.zero_grad()
    out.append(read(kept))
    loss()
    out.append(read(kept))
    return out


def agree(got, expected):
    return got is ViewError or abs(got - expected) <= CLOSE * abs(expected)


@in_turns(3)
@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("when", ["at rest", "at rest, without gradient", "in a forward"])
def test_a_view_that_is_kept_is_one_devices_or_an_error(when, view):
    when, _, without = when.partition(", ")
    expected = readings(None, VIEWS[view], when, not without)
    assert abs(expected[-1] - expected[0]) > 100 * CLOSE * abs(expected[0])  # old values would be seen
    for name, plan in PLANS.items():
        ranks = Plan(**plan).mesh
        count = 1
        for size in ranks.values():
            count *= size
        for got in run_ranks(count, readings, plan, VIEWS[view], when, not without):
            assert all(map(agree, got, expected)), (name, got, expected)
            if name in FOLLOWS:
                assert ViewError not in got, (name, got)
            if when == "at rest":
                assert ViewError not in got[:3], (name, got)  # until the step it is what it was


def precise(kind, take):
    """At rest and in a forward, with parameters that are copied into another dtype to compute with."""
    plan = {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": kind, "precision": Precision(torch.bfloat16)}
    return [readings(plan, take, when) for when in ("at rest", "in a forward")]


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_in_another_precision_no_view_shows_old_values(zero):
    take = VIEWS["[1:3]"]
    expected = readings(None, take, "at rest")
    for rest, forward in run_ranks(2, precise, zero, take):
        for got in (rest, forward):
            for one, other in zip(got[-2:], expected[-2:]):
                assert one is ViewError or abs(one - other) <= 0.02 * abs(other), (got, expected)


class Scaled(torch.autograd.Function):
    """Saves a view of a weight, and reads it in backward."""

    @staticmethod
    def forward(ctx, x, row):
        ctx.save_for_backward(x, row)
        return x * row.sum()

    @staticmethod
    def backward(ctx, grad):
        x, row = ctx.saved_tensors
        return grad * row.sum(), (grad * x).sum() * torch.ones_like(row)


class Saves(nn.Linear):
    def forward(self, x):
        return Scaled.apply(super().forward(x), self.weight[0])


def gradients(plan):
    torch.manual_seed(0)
    model = nn.Sequential(Saves(8, 6), nn.ReLU(), Saves(6, 4))
    if plan is not None:
        model, _ = parallelize(Plan(**plan), model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    model(torch.arange(32.0).view(4, 8) / 32).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [one if plan is None else one.full_tensor() for one in found]


@pytest.mark.parametrize("name", ["zero 0", "zero 3"])
def test_what_a_function_saved_is_there_in_its_backward(name):
    expected = gradients(None)
    for got in run_ranks(2, gradients, PLANS[name]):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


PLAIN = {
    "full_tensor": lambda w: w.full_tensor(),
    "to_local": lambda w: w.to_local(),
    "full_tensor of a view": lambda w: w[1:3].full_tensor(),
    "to_local of a view": lambda w: w.detach().view(-1).to_local(),
    "redistributed": lambda w: w.redistribute([Shard(0)]).to_local(),
}


def plain(plan, taken):
    """A plain tensor that was made of a weight in a forward, and a clone of it, made there."""
    model, _ = made(plan)

    def take(weight):
        tensor = PLAIN[taken](weight)
        return tensor, tensor.detach().clone()

    model[0].take = take
    model(torch.ones(4, COLUMNS))
    kept, clone = model[0].kept
    return torch.equal(kept.detach(), clone)


@pytest.mark.parametrize("taken", list(PLAIN))
@pytest.mark.parametrize("name", ["zero 0", "zero 3", "tp"])
def test_a_plain_tensor_made_in_a_forward_outlives_it(name, taken):
    assert all(run_ranks(2, plain, PLANS[name], taken))


def message():
    model, optimizer = made(PLANS["zero 3"])
    model[0].take = lambda weight: weight[0]
    loss = model(torch.ones(4, COLUMNS)).sum()
    found = []
    for ends in (lambda: model[0].kept, lambda: model[0].weight.detach()[0]):
        kept = ends()
        if found:
            loss.backward()
            optimizer.step()
        with pytest.raises(ViewError) as error:
            kept + 1
        found.append(str(error.value))
    return found


def test_the_error_says_which_parameter_and_what_to_do():
    for freed, stale in run_ranks(2, message):
        assert "'0.weight'" in freed and "freed afterwards" in freed and "clone()" in freed
        assert "'0.weight'" in stale and "optimizer's step" in stale and "clone()" in stale
