"""Users' autograd Functions in the modules of a pipeline's stages: their own backward computes the gradients of inputs
and of weights, in every schedule."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, ROWS = 6, 8


class Linear(torch.autograd.Function):
    """Its backward is not what autograd would derive: a wrong path shows."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 0.9 * grad @ weight, 0.8 * grad.t() @ x, 0.7 * grad.sum(0)


class Rounded(torch.autograd.Function):
    """Of a weight alone."""

    @staticmethod
    def forward(ctx, weight):
        return (weight * 8).round() / 8

    @staticmethod
    def backward(ctx, grad):
        return 0.9 * grad


class Pair(torch.autograd.Function):
    """Two outputs, one without a gradient; and what is no tensor among the arguments."""

    @staticmethod
    def forward(ctx, scale, x, weight):
        out = scale * torch.tanh(x)
        ctx.save_for_backward(out, weight)
        ctx.scale, ctx.needed = scale, ctx.needs_input_grad
        mask = out > 0
        ctx.mark_non_differentiable(mask)
        return out * weight, mask

    @staticmethod
    def backward(ctx, grad, _):
        out, weight = ctx.saved_tensors
        return None, 0.9 * grad * weight * (ctx.scale - out * out / ctx.scale), (grad * out).sum(0)


class Squared(torch.autograd.Function):
    """A loss."""

    @staticmethod
    def forward(ctx, x, weight, y):
        out = x @ weight - y
        ctx.save_for_backward(x, weight, out)
        return out.square().mean()

    @staticmethod
    def backward(ctx, grad):
        x, weight, out = ctx.saved_tensors
        grad = 2.2 * grad * out / out.numel()
        return grad @ weight.t(), x.t() @ grad, None


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2), nn.Parameter(torch.ones(WIDTH))
        self.kind = kind

    def forward(self, x):
        if self.kind == "linear":
            return x + Linear.apply(x, self.weight, self.bias).tanh()
        if self.kind == "rounded":
            return x + F.linear(x, Rounded.apply(self.weight), self.bias).tanh()
        out, mask = Pair.apply(1.5, F.linear(x, self.weight), self.bias)
        return x + out.masked_fill(mask & (out > 1), 1)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3) / 4)

    def forward(self, x, y):
        return Squared.apply(x, self.weight, y)


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(6))
        self.head = Head()

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return self.head(x, y)


def trained(kind, chosen=None):
    torch.manual_seed(0)
    model = Net(kind)

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.02)

    model, optimizer = vescale.parallelize(chosen, model, make) if chosen else (model, make(model.parameters()))
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 3, generator=generator)
        loss = model(*batch)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append((loss.detach(), model(*batch), gradients))
    return [(loss, after, {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in all_of_them.items()})
            for loss, after, all_of_them in found]  # fmt: skip


SCHEDULES = {
    "1f1b": {"cuts": ("blocks.3",), "schedule": "1f1b"},
    "zb-h1": {"cuts": ("blocks.3",), "schedule": "zb-h1"},
    "interleaved": {"cuts": ("blocks.1", "blocks.3", "blocks.5"), "schedule": "interleaved", "virtual": 2},
    "zbv": {"cuts": ("blocks.2", "blocks.3", "head"), "schedule": "zbv", "virtual": 2},
}


def cases(mesh, schedules, **more):
    plans = {
        name: vescale.Plan(
            mesh=mesh, parameters={"*": {}}, pipeline=vescale.Pipeline(microbatches=4, **SCHEDULES[name]), **more
        )
        for name in schedules
    }
    return {(kind, name): trained(kind, one) for kind in KINDS for name, one in plans.items()}


KINDS = ("linear", "rounded", "pair")


@pytest.mark.parametrize(
    ("ranks", "arguments", "more"),
    [(2, ({"pp": 2}, tuple(SCHEDULES)), {}), (4, ({"pp": 2, "dp": 2}, ("1f1b",)), {"zero": 3})],
    ids=["pp2", "pp2 dp2 zero3"],
)
def test_a_function_in_a_stage_trains_as_on_one_device(ranks, arguments, more):
    wanted = {kind: trained(kind) for kind in KINDS}
    for found in run_ranks(ranks, cases, *arguments, timeout=120, **more):
        for (kind, _), steps in found.items():
            for (loss, after, gradients), (one_loss, one_after, one_gradients) in zip(steps, wanted[kind]):
                torch.testing.assert_close(loss, one_loss, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(after, one_after, rtol=1e-5, atol=1e-6)
                for name, gradient in gradients.items():
                    torch.testing.assert_close(gradient, one_gradients[name], rtol=1e-4, atol=1e-5)
