"""Parameters that are frozen and thawed in the middle of a training: one device's losses and parameters, whatever was
trained when the model was parallelized, at every ZeRO stage."""

import copy
import itertools

import pytest
import torch
from torch import nn

from vescale_dtensor import Replicate, Shard
from vescale_plans import Boundary, Plan, parallelize
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, STEPS = 8, 7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.low, self.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) + self.high(self.low(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x, targets):
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)), targets)


TP = {
    "parameters": {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}},
    "boundaries": {"*.down": Boundary(output={"tp": Replicate()})},
}
PLANS = {
    **{f"zero{zero}": Plan(mesh={"dp": 2}, zero=zero, parameters={"*": {}}) for zero in range(4)},
    "tp": Plan(mesh={"tp": 2}, **TP),
    **{f"dp2 x tp2, zero{zero}": Plan(mesh={"dp": 2, "tp": 2}, zero=zero, **TP) for zero in (1, 3)},
}

# --- phases: which parameters are trained from which step on, by parts of their names ---------------------------------

ADAPTERS = ("low", "high")
PHASES = {
    "head, then all": {0: ("head",), 3: ("",)},
    "head, blocks by and by": {0: ("head",), 2: ("head", "blocks.2"), 4: ("head", "blocks.2", "blocks.1"), 5: ("",)},
    "all, then head, then all": {0: ("",), 2: ("head",), 5: ("",)},
    "adapters, then the base": {0: ADAPTERS, 3: ("up", "down", "norm", "head")},
    "adapters, both, adapters": {0: ADAPTERS, 2: ("",), 4: ADAPTERS},
    "nothing at first": {0: ("norm.bias",), 2: ("weight",), 4: ("bias",), 6: ("",)},
    "one of a block": {0: ("head",), 2: ("head", "blocks.1.up.weight"), 4: ("head", "blocks.1.up.bias", "0.low")},
}


def train_only(model, parts):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.02),
}
# What of the loop is written in another way.
WAYS = ("all given", "groups added", "zeros", "clipped", "hooked", "accumulated", "stale gradients")


def shrink(parameter):
    parameter.grad.mul_(0.7)


def trained(model, phases, make, way, plan=None):
    train_only(model, phases[0])
    added = way == "groups added"
    given = lambda model: [p for p in model.parameters() if p.requires_grad] if added else list(model.parameters())
    if plan is None:
        optimizer = make(given(model))
    else:
        model, optimizer = parallelize(plan, model, lambda _: make(given(model)))
    held, losses, seen = {id(p) for p in given(model)}, [], []
    for step in range(STEPS):
        if step in phases:
            train_only(model, phases[step])
            new = [p for p in model.parameters() if p.requires_grad and id(p) not in held]
            if added and new:
                optimizer.add_param_group({"params": new, "lr": 0.03})
                held |= set(map(id, new))
            if way == "hooked":
                for name, parameter in model.named_parameters():
                    if parameter.requires_grad and name not in seen:
                        parameter.register_hook(lambda gradient: gradient * 0.5)
                        parameter.register_post_accumulate_grad_hook(shrink)
                        seen.append(name)
        for part in range(2 if way == "accumulated" else 1):
            generator = torch.Generator().manual_seed(10 * step + part)
            loss = model(torch.randn(4, WIDTH, generator=generator), torch.randint(3, (4,), generator=generator))
            loss.backward()
            losses.append(loss.item())
        if way == "clipped":
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        losses.append(sum(p.grad is not None for p in model.parameters()))
        optimizer.step()
        if way != "stale gradients" or not step % 2:
            optimizer.zero_grad(set_to_none=way != "zeros")
            if added:
                model.zero_grad()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def run(plan, cases):
    for phases, optimizer, way in cases:
        where = f"{phases}, {optimizer}, {way}"
        torch.manual_seed(0)
        alone = Net()
        model = copy.deepcopy(alone)
        try:
            wanted = trained(alone, PHASES[phases], OPTIMIZERS[optimizer], way)
            got = trained(model, PHASES[phases], OPTIMIZERS[optimizer], way, plan)
        except Exception as error:
            error.add_note(where)
            raise
        assert got[0] == pytest.approx(wanted[0], rel=1e-4, abs=1e-5), where
        for name, one in wanted[1].items():
            apart = (one - got[1][name].full_tensor()).norm()
            assert apart <= 1e-4 * one.norm() + 1e-5, f"{where}: {name} is {apart:.2g} apart"


WRITTEN = [
    case for case in itertools.product(OPTIMIZERS, WAYS)
    if case != ("Adagrad", "groups added")  # whose sums are made by its constructor alone
]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "phases"), slice_of(itertools.product(PLANS, PHASES), 14)
)
def test_what_is_frozen_and_thawed_trains_as_on_one_device(plan, phases):
    cases = [(phases, *case) for case in slice_of(WRITTEN, 9)]
    run_ranks(PLANS[plan].world_size, run, PLANS[plan], cases, timeout=240.0)
