"""A step between a forward and its backward: autograd refuses a backward whose weights have changed since, as on one
device, and on every rank."""

from functools import partial

import pytest
import torch
from torch import nn

from vescale_dtensor import Replicate, Shard
from vescale_plans import Plan, parallelize
from vescale_testkit import assert_ranks_agree, run_ranks, slice_of, warm_up

warm_up("vescale_plans")

OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AdamW, one by one": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),  # of which autograd does not hear
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, foreach=False),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = partial(torch.optim.Muon, lr=1e-2)
PLANS = {
    "one rank": {"mesh": {"dp": 1}},
    "dp 2": {"mesh": {"dp": 2}},
    "dp 2, zero 1": {"mesh": {"dp": 2}, "zero": 1},
    "dp 2, zero 2": {"mesh": {"dp": 2}, "zero": 2},
    "dp 2, zero 3": {"mesh": {"dp": 2}, "zero": 3},
    "dp 2 tp 2": {"mesh": {"dp": 2, "tp": 2}, "zero": 1},
}


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 8, bias=False)]
    return nn.Sequential(*layers)


def plan_of(name):
    parameters = {"*": {}}
    if "tp" in PLANS[name]["mesh"]:
        parameters = {"0.weight": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "*": {"tp": Replicate()}}
    return Plan(parameters=parameters, **PLANS[name])


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def outcomes(plan):
    """By optimizer: whether a backward after a step ran, the loop's losses before it, and a step's after it."""
    found = {}
    for name, make in OPTIMIZERS.items():
        model = net()
        if plan is None:
            optimizer = make(model.parameters())
        else:
            model, optimizer = parallelize(plan_of(plan), model, make)
        losses = []
        for step in range(3):
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model(batch(3)).square().mean().backward()
        late = model(batch(4)).square().mean()
        optimizer.step()
        try:
            late.backward()
            ran = True
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
            ran = False
        optimizer.zero_grad()
        losses.append(model(batch(5)).square().mean().item())
        found[name] = (ran, losses)
    return found


@pytest.mark.parametrize("plan", slice_of(PLANS, fraction=2))
def test_a_backward_after_a_step_is_refused_as_on_one_device(plan):
    """It computed gradients by the weights of after the step, silently."""
    wanted = outcomes(None)
    assert {name for name, (ran, _) in wanted.items() if ran} <= {"AdamW, fused"}
    ranks = torch.tensor(list(PLANS[plan]["mesh"].values())).prod().item()
    found = run_ranks(ranks, outcomes, plan, timeout=300)
    assert_ranks_agree([{name: ran for name, (ran, _) in each.items()} for each in found])
    for name, (ran, losses) in found[0].items():
        assert ran == wanted[name][0], name
        assert losses == pytest.approx(wanted[name][1], rel=1e-4), name
