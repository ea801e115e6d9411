"""A plan is asked for, and the program goes on as if it had not been: random generators, buffers, attributes."""

import random

import numpy
import pytest
import torch
from torch import nn

from vescale_dtensor import Shard
from vescale_plans import Plan, PlanError, dry_run
from vescale_plans.search import sample_of, structure_of
from vescale_plans.search.generate import generate_plan
from vescale_plans.search.pricing.predict import predict
from vescale_plans.search.refusals import InfeasibleError

OWN = torch.Generator()
"""Of the program, not of a module."""
DRAWS = {
    "rand": lambda x: torch.rand(x.shape[-1]),
    "randn_like": lambda x: torch.randn_like(torch.ones(3)),
    "dropout": lambda x: nn.functional.dropout(torch.ones(3)),
    "randperm": lambda x: torch.randperm(7),
    "bernoulli_": lambda x: torch.empty(4).bernoulli_(),
    "python": lambda x: random.random(),
    "gauss": lambda x: random.gauss(),
    "numpy": lambda x: numpy.random.rand(3),
    "normal": lambda x: numpy.random.normal(),
    "own": lambda x: torch.rand(3, generator=OWN),
    "handed": lambda x: torch.rand(3, generator=torch.default_generator) + torch.rand(3),
    "seeds": lambda x: (torch.manual_seed(3), random.seed(3), numpy.random.seed(3)),
}


class Drawing(nn.Module):
    """Draws in its forward, and in what it has of its own."""

    def __init__(self, draw, fails=False):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.generator = torch.Generator().manual_seed(5)
        self.draw, self.fails, self.calls, self.seen = draw, fails, 0, []

    def forward(self, x):
        torch.rand(2, generator=self.generator)
        self.draw(x)
        self.steps += 1
        self.mean.add_(1)
        self.calls += 1
        self.seen.append(self.calls)
        if self.fails:
            raise LookupError("this forward fails")
        return self.down(self.norm(self.up(x)).relu()).square().mean()


def generators(model):
    own = [OWN, model.generator, torch.default_generator]
    kinds = (tuple(each.get_state().tolist()) for each in own)
    return (*kinds, random.getstate(), str(numpy.random.get_state(legacy=False)))


def state(model):
    tensors = {name: one.clone() for name, one in model.state_dict().items()}
    return tensors, model.calls, list(model.seen), set(vars(model))


ASKED = {
    "generate_plan": lambda model, x: generate_plan(model, world_size=2, batch=4, sample=x, hardware="cpu"),
    "for one rank": lambda model, x: generate_plan(model, world_size=1, batch=4, sample=x, hardware="cpu"),
    "verify": lambda model, x: generate_plan(
        model, world_size=2, batch=4, sample=x, hardware="cpu", verify=x, pin={"tp": 2}
    ),
    "structure_of": lambda model, x: structure_of(model, sample_of(model, x)),
    "complete": lambda model, x: Plan(mesh={"tp": 2}, parameters={"up.*": {"tp": Shard(0)}, "*": {}}).complete(
        model, x
    ),
    "dry_run": lambda model, x: dry_run(Plan(mesh={"dp": 2}, parameters={"*": {}}), model, x),
    "predict": lambda model, x: predict(Plan(mesh={"dp": 2}, parameters={"*": {}}), model, x, "cpu"),
    "does not fit": lambda model, x: generate_plan(
        model, world_size=2, batch=4, sample=x, hardware="cpu", verify=x, memory=1
    ),
}


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "fails"])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("asked", ASKED)
def test_generators_buffers_and_attributes_are_as_before(asked, draw, fails):
    torch.manual_seed(0)
    model, x = Drawing(DRAWS[draw], fails).train(), torch.randn(4, 8)
    random.gauss()  # keeps a second number for later
    before, was = generators(model), state(model)
    try:
        ASKED[asked](model, x)
        assert not fails and asked != "does not fit"
    except (LookupError, PlanError, InfeasibleError):
        assert fails or asked == "does not fit"
    assert generators(model) == before
    now = state(model)
    assert now[1:] == was[1:]
    torch.testing.assert_close(now[0], was[0], rtol=0, atol=0)


class Choosing(nn.Module):
    """Goes one way or the other by a number that it draws."""

    def __init__(self, draw):
        super().__init__()
        self.up, self.down, self.draw = nn.ModuleList(nn.Linear(8, 32) for _ in range(2)), nn.Linear(32, 8), draw

    def forward(self, x):
        return self.down(self.up[int(self.draw() < 0.5)](x).relu())


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, lambda: numpy.random.rand()])
def test_what_is_found_does_not_depend_on_what_was_drawn_before(draw):
    found = []
    for seed in range(6):
        torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)
        model = Choosing(draw)
        found.append(structure_of(model, sample_of(model, torch.ones(4, 8))).groups)
    assert found == found[:1] * 6 and found[0]
