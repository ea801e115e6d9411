"""A plan for fewer ranks than the job has, and back: the others hold nothing, say so, and return in step."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale import Plan, PlanError, Shard
from vescale_testkit import full_values, run_ranks, warm_up

warm_up("vescale")

CUT = {"first.*": {"tp": Shard(0)}, "last.weight": {"tp": Shard(1)}, "*": {}}
WHOLE = {"*": {}}
PLANS = [
    Plan(mesh={"dp": 4}, parameters=WHOLE, zero=1),
    Plan(mesh={"dp": 2}, parameters=WHOLE, zero=3),
    Plan(mesh={"tp": 3}, parameters=CUT),
    Plan(mesh={"dp": 2, "tp": 2}, parameters=CUT),
    Plan(mesh={"dp": 1}, parameters=WHOLE),
    Plan(mesh={"a": 1, "dp": 3}, parameters=WHOLE, zero=2),
    Plan(mesh={"dp": 4}, parameters=WHOLE, zero=3),
]


class Odd(nn.Module):
    """Nothing divides by anything; one parameter is frozen, one is unused, one a user's class; buffers change."""

    def __init__(self, drop):
        super().__init__()
        self.drop = drop
        self.first, self.norm, self.last = nn.Linear(6, 11), nn.BatchNorm1d(11), nn.Linear(11, 3, bias=False)
        self.unused, self.own = nn.Parameter(torch.ones(5)), Own(torch.ones(3))
        self.register_buffer("passes", torch.zeros(2), persistent=False)
        self.first.bias.requires_grad_(False)
        self.own.note = "kept"

    def forward(self, x):
        self.passes += 1
        x = nn.functional.dropout(self.norm(self.first(x)).tanh(), self.drop, self.training)
        return (self.last(x) * self.own).square().mean()


class Own(nn.Parameter):
    pass


def batch(step):
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


def values_of(model, optimizer):
    return {**full_values(model, optimizer), "passes": model.passes.cpu().clone()}  # no part of the state


def run(plans, make, refuse=None, drop=0.2):
    """(losses of the steps that this rank ran, its values after each plan, whether it held nothing when outside)"""
    torch.manual_seed(0)
    model, losses, after, odd = Odd(drop), {}, {}, []
    names, heard = [name for name, _ in model.named_parameters()], []
    own = dict(model.named_parameters())
    if plans is None:
        optimizer = make(model.parameters())
    else:
        model, optimizer = vescale.parallelize(plans[0], model, make)
    own["last.weight"].register_hook(lambda gradient: heard.append(tuple(gradient.shape)))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for place in range(len(PLANS)):
        plan = None if plans is None else plans[place]
        if place:
            if plans is None or dist.get_rank() < plans[place - 1].world_size:
                model(batch(-place)).backward()
            if plan is not None:
                vescale.reshape(model, optimizer, plan)
        if plan is not None and dist.get_rank() >= plan.world_size:
            odd += refuse(model, optimizer, own)
            continue
        if [name for name, _ in model.named_parameters()] != names or own != dict(model.named_parameters()):
            odd.append("names")
        for step in range(2):
            heard.clear()
            loss = model(batch(2 * place + step))
            loss.backward()
            if heard != [(3, 11)]:
                odd.append(heard[:])
            optimizer.step()
            optimizer.zero_grad()
            if step:
                scheduler.last_epoch = place  # a loop's own counts are the loop's
                scheduler.step()
            losses[2 * place + step] = loss.item()
        after[place] = values_of(model, optimizer)
        if model.own.note != "kept" or type(model.own) is nn.Parameter or not isinstance(model.own, Own):
            odd.append("kind")
    return losses, after, odd


def refuse(model, optimizer, own):
    """What a rank outside holds, and what it says."""
    odd = list(model.state_dict()) + [name for name, one in own.items() if not one.is_meta]
    odd += [len(group["params"]) for group in optimizer.param_groups if group["params"]]
    with pytest.raises(PlanError, match=r"(?s)a rank that the plan leaves out.*around a step") as caught:
        model(batch(0))
    assert "DTensor" not in str(caught.value)
    with pytest.raises(PlanError, match="an optimizer runs on a rank that the plan leaves out"):
        optimizer.step()
    with pytest.raises(PlanError, match="a Linear runs on a rank"):
        model.first(batch(0))
    optimizer.zero_grad()
    return odd


MAKES = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


@pytest.mark.parametrize("name, device", [*((name, "cpu") for name in MAKES), ("sgd", "second")])
def test_ranks_go_and_come(name, device):
    drop = 0.2 if device == "cpu" else 0.0  # it draws other numbers than the host
    ((wanted, values, _),) = run_ranks(1, run, None, MAKES[name], drop=drop)
    for rank, (losses, after, odd) in enumerate(run_ranks(4, run, PLANS, MAKES[name], refuse, drop, device=device)):
        assert odd == []
        assert list(after) == [place for place, plan in enumerate(PLANS) if rank < plan.world_size]
        for step, loss in losses.items():
            assert loss == pytest.approx(wanted[step], rel=1e-5)
        for place, found in after.items():
            assert found.keys() == values[place].keys()
            for key, value in found.items():
                torch.testing.assert_close(value, values[place][key], rtol=1e-4, atol=1e-6)


def save_and_load(path):
    """A step that a job with ranks outside saves, and one that it loads."""
    torch.manual_seed(0)
    model, optimizer = vescale.parallelize(PLANS[0], Odd(0.0), MAKES["adamw"])
    state, found = {"model": model, "optimizer": optimizer}, []

    def step(plan, number):
        if dist.get_rank() < plan.world_size:
            model(batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()

    vescale.reshape(model, optimizer, PLANS[1])
    step(PLANS[1], 0)
    vescale.save(path, state, step=1)
    vescale.reshape(model, optimizer, PLANS[3])
    found.append(values_of(model, optimizer))
    step(PLANS[3], 1)
    vescale.load(path, state)
    found.append(values_of(model, optimizer))
    vescale.reshape(model, optimizer, PLANS[2])
    step(PLANS[2], 2)
    vescale.load(path, state)
    vescale.reshape(model, optimizer, PLANS[6])
    found.append(values_of(model, optimizer))
    del found[0]["passes"], found[1]["passes"], found[2]["passes"]  # not persistent
    return found


def test_checkpoints_of_some_of_the_ranks(tmp_path):
    for first, *others in run_ranks(4, save_and_load, tmp_path):
        for other in others:
            assert first.keys() <= other.keys()  # of what has no state yet a load makes zeros
            assert [key for key, value in first.items() if not torch.equal(value, other[key])] == []
