"""Optimizers made of a pipelined model's parameters and adopted: they train, and their states are those of one made by
`parallelize`, in both directions."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, ROWS = 8, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(x, y)


MAKE = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),  # its states are there from the start
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),  # not elementwise
}
# what an optimizer is given, of the parameters: how programs choose and group them
GROUPS = {
    "all": list,
    "trained": lambda parameters: [one for one in parameters if one.requires_grad],
    "by dims": lambda parameters: [
        {"params": [one for one in parameters if one.ndim > 1]},
        {"params": [one for one in parameters if one.ndim <= 1], "lr": 0.02},
    ],
    "one by one": lambda parameters: [{"params": [one]} for one in parameters],
}
# frozen layers, mesh, ZeRO stage
CASES = [
    ((), {"pp": 2}, 0),
    ((0, 1), {"pp": 2}, 0),  # all of the first stage's
    ((0,), {"pp": 2, "dp": 2}, 0),
    ((), {"pp": 2, "dp": 2}, 3),
    ((2, 3), {"dp": 2, "pp": 2}, 2),
    ((), {"pp": 2, "tp": 2}, 0),
]
GRID = [(kind, group, *case) for case in CASES for kind in MAKE for group in GROUPS if group != "one by one"]


def plan_of(mesh, zero):
    return vescale.Plan(
        mesh=mesh,
        parameters={"layers.0.*": {"tp": vescale.Shard(0)} if "tp" in mesh else {}, "*": {}},
        data_axis="dp" if "dp" in mesh else None,
        zero=zero,
        pipeline=vescale.Pipeline(cuts=("layers.2",), schedule="1f1b", microbatches=2),
    )


def built(frozen):
    torch.manual_seed(0)
    model = Net()
    for layer in frozen:
        model.layers[layer].requires_grad_(False)
    return model


def train(model, optimizer, numbers):
    for number in numbers:
        x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).unbind()
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def values_of(states):
    """Of a state dict, by the parameters' places, whole and plain; copies."""
    return {
        place: {
            key: one.full_tensor().clone() if isinstance(one, vescale.DTensor) else torch.as_tensor(one).clone()
            for key, one in state.items()
        }
        for place, state in states["state"].items()
    }


def continued(kind, group, frozen, *case):
    def make(model):
        return MAKE[kind](GROUPS[group](list(model.parameters())))

    alone = built(frozen)
    train(alone, make(alone), range(6))

    # The same grouping in the factory, of which parallelize gives parameters to choose from.
    model, first = vescale.parallelize(plan_of(*case), built(frozen), lambda p: MAKE[kind](GROUPS[group](list(p))))
    train(model, first, range(2))
    second = vescale.adopt(model, make(model))
    assert [len(one["params"]) for one in second.param_groups] == [len(one["params"]) for one in first.param_groups]
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(values_of(second.state_dict()), values_of(first.state_dict()), rtol=0, atol=0)
    train(model, second, range(2, 4))
    first.load_state_dict(second.state_dict())
    torch.testing.assert_close(values_of(first.state_dict()), values_of(second.state_dict()), rtol=0, atol=0)
    train(model, first, range(4, 6))
    same(model, alone)


def same(model, alone):
    wanted = dict(alone.named_parameters())
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.detach().full_tensor(), wanted[name].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", slice_of(GRID, 5), ids=str)
def test_states_go_from_one_optimizer_to_another(case):
    run_ranks(2 * case[3].get("dp", case[3].get("tp", 1)), continued, *case)


def adopted_from_the_start(kind, group, frozen, *case):
    alone = built(frozen)
    train(alone, MAKE[kind](GROUPS[group](list(alone.parameters()))), range(3))
    model, _ = vescale.parallelize(plan_of(*case), built(frozen))
    optimizer = vescale.adopt(model, MAKE[kind](GROUPS[group](list(model.parameters()))))
    names = dict(model.named_parameters()).values()
    held = [one for each in optimizer.param_groups for one in each["params"]]
    assert all(any(one is other for other in names) for one in held)
    train(model, optimizer, range(3))
    same(model, alone)


@pytest.mark.parametrize("case", slice_of(CASES, 2), ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_an_adopted_optimizer_trains_as_on_one_device(group, case):
    run_ranks(2 * case[1].get("dp", case[1].get("tp", 1)), adopted_from_the_start, "adamw", group, *case)
