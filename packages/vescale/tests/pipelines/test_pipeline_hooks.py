"""Hooks on the gradients of values, and evaluation in torch's inference mode, against accumulation on one device."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_pipeline import PipelineError
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, ROWS, COUNT, STEPS = 8, 2, 3, 2


class Block(nn.Module):
    """Scales a gradient inside of a module."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.up(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 2)
        return x + self.down(hidden)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def between(self, index, before, after):
        """And between modules."""
        if after.requires_grad:
            after.register_hook(lambda gradient: gradient * 1.5)

    def forward(self, x, y):
        for index, block in enumerate(self.blocks):
            before, x = x, block(x)
            self.between(index, before, x)
        return F.mse_loss(x, y)


class HooksLate(Net):
    def between(self, index, before, after):
        if index == 2:
            before.register_hook(lambda gradient: gradient * 1.5)


class Retains(Net):
    def between(self, index, before, after):
        after.retain_grad()


def made(kind, frozen=(), model=Net):
    torch.manual_seed(0)
    model = model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    if kind is None:
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = vescale.Pipeline(cuts=("blocks.2",), schedule=kind, microbatches=COUNT)
    plan = vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, pipeline=pipeline)
    return vescale.parallelize(plan, model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, COUNT * ROWS, WIDTH, generator=generator).unbind() for _ in range(STEPS)]


def differing(kind, frozen, evaluates):
    """The parameters of this rank that are not one device's."""
    model, optimizer = made(kind, frozen)
    alone, its_optimizer = made(None, frozen)
    for x, y in batches():
        if evaluates:
            with torch.inference_mode():
                inferred = x * 1
                model(inferred, y)
            with torch.no_grad():
                model(inferred, y)
        model(x, y).backward()
        if evaluates:
            with torch.inference_mode():
                torch.testing.assert_close(model(x, y), alone(x, y))
        for rows, labels in zip(x.split(ROWS), y.split(ROWS)):
            (alone(rows, labels) * (1 / COUNT)).backward()
        for one in (optimizer, its_optimizer):
            one.step()
            one.zero_grad()
    wanted = dict(alone.named_parameters())
    return [name for name, one in model.named_parameters() if not torch.equal(one.full_tensor(), wanted[name])]


@pytest.mark.parametrize("kind, frozen", [("1f1b", ()), ("zb-h1", ()), ("1f1b", ("blocks.0", "blocks.1"))])
def test_hooks_on_gradients_of_values(kind, frozen):
    assert run_ranks(2, differing, kind, frozen, False) == [[], []]


def test_evaluation_in_inference_mode():
    assert run_ranks(2, differing, "1f1b", (), True) == [[], []]


def refused(model):
    (x, y), _ = batches()
    try:
        made("1f1b", model=model)[0](x, y)
    except PipelineError as error:
        return str(error)


@pytest.mark.parametrize(
    "model, text",
    [
        (HooksLate, "a hook is registered in stage 1 on the gradient of a value of 'blocks.1', which is of stage 0"),
        (Retains, "retain_grad was called on a value of 'blocks.0'"),
    ],
)
def test_gradients_that_no_hook_can_see_are_refused(model, text):
    told = run_ranks(2, refused, model)
    assert told[0] == told[1] and text in told[0]
