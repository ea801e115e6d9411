"""Blocks of random trainings whose forwards write, draw, read numbers, or compute their weights anew."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

WIDTH = 8


class Projected(nn.Module):
    """The two projections that plans know by their names."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Counting(Projected):
    """A number of Python's that every call moves."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * (self.calls % 3))


class Clipped(Projected):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Spectral(Projected):
    """Weights over their largest singular value, by a power iteration on buffers."""

    def __init__(self):
        super().__init__()
        parametrizations.spectral_norm(self.up)


class Weighted(Projected):
    def __init__(self):
        super().__init__()
        parametrizations.weight_norm(self.down)


class Remembering(Projected):
    """Adds what the call before saw, from a buffer that is replaced."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(WIDTH))

    def forward(self, x):
        h = x + self.memory
        if self.training:
            self.memory = x.detach().mean((0, 1))
        return super().forward(h)


class Collecting(Projected):
    """A list of tensors, the last of which the next call reads."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        h = x + self.seen[-1] if self.seen else x
        self.seen.append(x.detach().mean())
        return super().forward(h)


class Noisy(Projected):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x) if self.training else x)


class Branching(Projected):
    """Goes another way by a number that it reads."""

    def forward(self, x):
        return super().forward(x * 0.5 if x.abs().mean().item() > 0.6 else x)


class Straight(torch.autograd.Function):
    """Rounds, and hands the gradient through."""

    @staticmethod
    def forward(ctx, x):
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx, grad):
        return grad


class Rounded(Projected):
    def forward(self, x):
        return super().forward(torch.tanh(x)) + 0.1 * Straight.apply(torch.tanh(x))


BLOCKS = (Counting, Clipped, Spectral, Weighted, Remembering, Collecting, Noisy, Branching, Rounded)
# A second run in backward would find another state than the first left: no checkpoints, nor several calls.
ONCE = tuple(f"{one.__name__}()" for one in (Counting, Clipped, Spectral, Remembering, Collecting))
