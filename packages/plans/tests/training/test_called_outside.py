"""ZeRO-3: a part of a block that the model also calls outside of that block, before, after or in place of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks

WIDTH = 8


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, t):
        scale, shift = self.out(self.embed(t))[:, None].chunk(2, -1)
        return x * (1 + scale) + shift


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Modulated()
        self.ff = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x, t):
        return x + self.ff(self.norm(x, t))


def after(model, x, t):
    """As diffusers' DiT does: the first block's embedding modulates what leaves the last."""
    scale, shift = model.final(model.run(x, t)[1](t))[:, None].chunk(2, -1)
    return model.run(x, t)[0] * (1 + scale) + shift


def before(model, x, t):
    return model.run(x + model.blocks[1].norm.embed(t)[:, None], t)[0]


def by_function(model, x, t):
    weight = model.blocks[2].norm.out.weight
    return model.run(x, t)[0] + F.linear(t, weight).chunk(2, -1)[1][:, None]


def without_gradient(model, x, t):
    with torch.no_grad():
        seen = model.blocks[2].norm.embed(t)[:, None]
    return model.run(x, t)[0] + seen


def in_place_of_it(model, x, t):
    """The last block as a whole is never called, only a part of it."""
    for block in model.blocks[:-1]:
        x = block(x, t)
    return model.blocks[-1].ff(x)


WAYS = (after, before, by_function, without_gradient, in_place_of_it)


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first, self.final = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def run(self, x, t):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, t)
        return x, self.blocks[0].norm.embed

    def forward(self, x, t):
        return self.way(self, x, t).square().mean()


def trained(model, optimizer):
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, t = (torch.randn(shape, generator=generator, dtype=torch.double) for shape in ((4, 5, WIDTH), (4, WIDTH)))
        loss = model(x, t)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]


def both(way, checkpointing):
    def make(parameters):
        return torch.optim.SGD(parameters, 0.2, momentum=0.9)

    def built():
        torch.manual_seed(0)
        return Model(way).double()

    alone = built()
    wanted = trained(alone, make(alone.parameters()))
    plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, checkpointing={"blocks.*": True} if checkpointing else {})
    for one, other in zip(trained(*parallelize(plan, built(), make)), wanted):
        torch.testing.assert_close(one.full_tensor() if hasattr(one, "full_tensor") else one, other)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_on_one_device(way, checkpointing):
    run_ranks(2, both, way, checkpointing)
