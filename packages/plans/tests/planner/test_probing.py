"""How many forwards a probe takes, of models whose rows are hard to tell."""

import torch
import torch.nn.functional as F
from torch import nn

from vescale_plans.search import sample_of, structure_of
from vescale_plans.search.progress import Bar


class Counted(Bar):
    """Counts the steps that it is told."""

    steps = 0

    def tick(self, what, total=None):
        self.steps += 1


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.inward = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.outward = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.inward)
        return self.outward(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Residual(nn.Module):
    """Two convolutions with norms, between which the step of a diffusion is added."""

    def __init__(self, width, stride):
        super().__init__()
        self.one, self.two = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.first, self.second = nn.Conv2d(width, width, 3, stride, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.step, self.short = nn.Linear(24, width), nn.Conv2d(width, width, 1, stride)

    def forward(self, x, steps):
        out = self.first(F.silu(self.one(x))) + self.step(steps)[:, :, None, None]
        return self.short(x) + self.second(F.silu(self.two(out)))


class Diffusion(nn.Module):
    """Residual blocks that halve the picture, after which its places attend to one another. The steps are integers, and
    no number of theirs comes out of a table."""

    def __init__(self, width=16, strides=(1, 2, 1, 2)):
        super().__init__()
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.steps = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 24))
        self.blocks = nn.ModuleList(Residual(width, stride) for stride in strides)
        self.norm, self.attention = nn.GroupNorm(1, width), Attention(width)
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, steps):
        angles = steps[:, None].float() * torch.arange(1, 5)
        steps = self.steps(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.begin(x)
        for block in self.blocks:
            x = block(x, steps)
        places = self.norm(x).flatten(2).transpose(1, 2)  # not contiguous: a linear layer adds its bias by itself
        return self.end(x + self.attention(places).transpose(1, 2).unflatten(2, x.shape[2:]))


class OneStep(Diffusion):
    """Of which all rows are at the same step."""

    def forward(self, x, steps):
        return super().forward(x, steps.expand(len(x)))


def test_a_diffusion_is_probed_in_few_forwards():
    """Strides, and steps that are integers or shared, hide no rows from the probe, so that its tests share forwards."""
    found = []
    for kind, steps in ((Diffusion, torch.tensor([7.0])), (Diffusion, torch.tensor([7])), (OneStep, torch.tensor(7))):
        bar, model = Counted(), kind()
        sample = sample_of(model, {"x": torch.randn(1, 3, 8, 8), "steps": steps})
        found.append(structure_of(model, sample, bar))
        assert bar.steps <= 50, (kind, steps, bar.steps)
    shown, *others = found  # numbers of their own are followed row by row
    assert all(other.groups == shown.groups for other in others)
    for at in range(4):  # with the step that is added between two convolutions, the norm behind it
        inward = {one.parameter for one in sources(shown, f"blocks.{at}.second.weight")}
        assert inward == {f"blocks.{at}.{name}" for name in ("step.weight", "two.weight", "two.bias")}
    asking = [one for one in sources(shown, "attention.outward.weight") if one.parameter.endswith("weight")]
    assert asking and all(one.bias == one.parameter.replace("weight", "bias") for one in asking)


def sources(found, sink):
    return next(group.sources for group in found.groups if group.sink == sink)
