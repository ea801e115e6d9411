"""A step in slices: the same bits, the same states, whatever the optimizer, and groups and states as they were."""

from functools import partial

import pytest
import torch
from torch import nn

from vescale_dtensor.testing import in_turns, run_ranks, warm_up
from vescale_plans import Plan, parallelize, register_elementwise
from vescale_plans._zero import optim_slices

warm_up("torch._dynamo", "vescale_plans")

SLICE = 64
KINDS = {
    "ASGD": {"lr": 0.01},
    "Adadelta": {"lr": 0.5},
    "Adagrad": {"lr": 0.02, "initial_accumulator_value": 0.1, "lr_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True, "maximize": True},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.003, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}


class Mine(torch.optim.AdamW):
    """Whose step is its base's."""


class Own(torch.optim.Optimizer):
    """A step of the user's, of which nobody knows that it gains."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * self.state[p].setdefault("scale", torch.ones_like(p)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(33, 35), nn.Linear(35, 2)
        self.late = nn.Parameter(torch.ones(2, 97))

    def forward(self, x, uses_late):
        x = self.second(self.first(x).relu())
        return (x @ self.late if uses_late else x).square().mean()


def trained(kind, options, zero, slice_, monkeypatch, dtype=torch.float32, threads=1):
    """Parameters and states after four steps, and how many tensors each step was given."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    monkeypatch.setattr(optim_slices, "SLICE", slice_)
    given, kind = [], getattr(torch.optim, kind) if isinstance(kind, str) else kind
    plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero)
    model, optimizer = parallelize(plan, Net().to(dtype), partial(kind, **options))
    own = optimizer._own_step()

    def counting(**more):
        given.append([p.numel() for group in optimizer.param_groups for p in group["params"]])
        assert len(optimizer.state) <= len(given[-1])
        return own(**more)

    optimizer._own_step = lambda: counting
    for step in range(4):
        model(torch.randn(4, 33, generator=torch.Generator().manual_seed(step)).to(dtype), step > 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [
        (name, key, value.full_tensor() if hasattr(value, "full_tensor") else value)
        for name, values in optimizer.sharded_state_dict()["state"].items()
        for key, value in values.items()
    ]
    return [p.detach().full_tensor() for p in model.parameters()], states, given


def same_with_slices(kinds, zero, dtype=torch.float32):
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for kind, options in kinds:
            whole = trained(kind, options, zero, 1 << 30, monkeypatch, dtype)
            cut = trained(kind, options, zero, SLICE, monkeypatch, dtype)
            assert all(map(torch.equal, whole[0], cut[0])), kind
            assert [one[:2] for one in whole[1]] == [one[:2] for one in cut[1]], kind
            for (*_, wanted), (*_, found) in zip(whole[1], cut[1], strict=True):
                assert torch.equal(torch.as_tensor(wanted), torch.as_tensor(found)), kind
            assert max(cut[2][-1]) <= SLICE, (kind, cut[2][-1])  # the fourth step finds states of all parameters
            assert max(whole[2][-1]) > SLICE
            assert sum(cut[2][-1]) == sum(whole[2][-1])


@in_turns(3)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_slices_give_the_bits_of_the_whole(zero):
    run_ranks(2, same_with_slices, [*KINDS.items(), (Mine, {"lr": 0.01})], zero, timeout=120)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_in_other_dtypes(dtype):
    run_ranks(2, same_with_slices, list(KINDS.items()), 0, dtype, timeout=120)


def steps_whole():
    with pytest.MonkeyPatch.context() as monkeypatch:
        register_elementwise(Own)
        for kind, options in ((Own, {}), ("AdamW", {"foreach": True}), ("Adam", {"fused": True})):
            given = trained(kind, options, 0, SLICE, monkeypatch)[2]
            assert given[0] == given[-1], kind
        given = trained("AdamW", {}, 0, SLICE, monkeypatch, threads=2)[2]
        assert given[0] == given[-1]
    torch.set_num_threads(1)


def test_what_is_given_whole_tensors():
    run_ranks(2, steps_whole)


def fails_and_goes_on():
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(optim_slices, "SLICE", SLICE)
        plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=1)
        model, optimizer = parallelize(plan, nn.Linear(33, 35), partial(torch.optim.AdamW, lr=0.01))

        def step(lr):
            model(torch.ones(4, 33)).square().mean().backward()
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()

        step(0.01)
        shown, keys = list(optimizer.param_groups[0]["params"]), list(optimizer.state)
        with pytest.raises(TypeError):
            step("much")
        assert all(a is b for a, b in zip(shown, optimizer.param_groups[0]["params"], strict=True))
        assert all(a is b for a, b in zip(keys, optimizer.state, strict=True))
        before = model.weight.full_tensor().detach().clone()
        step(0.01)
        assert not torch.equal(before, model.weight.full_tensor())


def test_a_step_that_fails_leaves_the_groups_and_states():
    run_ranks(2, fails_and_goes_on)
