"""autograd Functions that treat a weight as an object: its class, what is on it, its gradient, lists beside it."""

import pytest
import torch
from torch import nn

from vescale_dtensor import Shard
from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks


class Weight(nn.Parameter):
    def doubled(self):
        return self * 2


class Fused(torch.autograd.Function):
    """Adds the weight's gradient itself: as a new one, in place, or where its owner accumulates (`main_grad`)."""

    @staticmethod
    def forward(ctx, x, weight, how, seen):
        assert isinstance(weight, nn.Parameter) and isinstance(weight, Weight) == (how == "in place")
        seen.append((tuple(weight.shape), weight.tag))
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return x @ (weight.doubled() if how == "in place" else weight).t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        found = grad.t() @ x * (2 if ctx.how == "in place" else 1)
        if ctx.how == "main":
            weight.main_grad.add_(found)
            weight.was_added = True
        elif weight.grad is None:
            weight.grad = found
        elif ctx.how == "new":
            weight.grad = weight.grad + found
        else:
            weight.grad.add_(found)
        return grad @ (weight * 2 if ctx.how == "in place" else weight), None, None, None


class Layer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        kind = Weight if how == "in place" else nn.Parameter
        self.weight, self.how, self.seen = kind(torch.randn(6, 6) / 2), how, []
        self.weight.tag = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Fused.apply(x, self.weight, self.how, self.seen)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.layers = nn.ModuleList([Layer(how) for how in ("new", "in place", "main")])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        x = x + self.layers[0](x)  # again, and as torch's own do
        return self.head(x) + (x @ self.layers[1].weight)[:, :3]


def run(options: dict | None):
    torch.manual_seed(0)
    model = Net()
    if options is None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    else:
        plan = Plan(**options)
        model, optimizer = parallelize(plan, model, lambda given: torch.optim.Adam(given, lr=0.02), mode="eager")
    main, losses = model.layers[2].weight, []
    for step in range(3):
        main.main_grad, main.was_added = torch.zeros_like(main), False
        for part in range(2):  # two backwards are added
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + part))
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert main.was_added and main.grad is None
        main.grad = main.main_grad.detach()
        gradients = [(getattr(one.grad, "full_tensor", one.grad.clone)()).clone() for one in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    values = [(getattr(one, "full_tensor", one.clone)()).detach().clone() for one in model.parameters()]
    return losses, gradients, values, [layer.seen for layer in model.layers]


@pytest.mark.parametrize(
    "ranks, options",
    [
        (1, {"mesh": {"dp": 1}, "parameters": {"*": {}}}),
        (2, {"mesh": {"dp": 2}, "parameters": {"*": {}}}),
        (2, {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 2}),
        (2, {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 3}),
        (2, {"mesh": {"tp": 2}, "parameters": {"layers.*.weight": {"tp": Shard(1)}, "*": {}}}),
    ],
)
def test_one_devices_numbers(ranks, options):
    *expected, appended = run(None)
    for *found, seen in run_ranks(ranks, run, options):
        assert seen == appended and len(seen[0]) == 12
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# --- what a Function computes with modules ----------------------------------------------------


class Recomputed(torch.autograd.Function):
    """Recomputes in the backward, as many libraries' own checkpoints do: weights are operands, for their gradients."""

    @staticmethod
    def forward(ctx, module, x, *weights):
        ctx.module, ctx.weights = module, weights
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        return None, *torch.autograd.grad(out, (x, *ctx.weights), grad, allow_unused=True)


class Kept(Recomputed):
    """Another forward and backward, which keep the graph inside."""

    @staticmethod
    def forward(ctx, module, x, *weights):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = module(x)
        ctx.module = module
        ctx.save_for_backward(x, out)
        return out.detach()

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        return None, *torch.autograd.grad(out, (x, *ctx.module.parameters()), grad)


class Aside(Recomputed):
    """The forward of the class that it extends; weights are no operands, and get their gradients in the backward."""

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        weights = tuple(ctx.module.parameters())
        with torch.enable_grad():
            out = ctx.module(x)
        found, *rest = torch.autograd.grad(out, (x, *weights), grad)
        for weight, one in zip(weights, rest):
            weight.grad = one if weight.grad is None else weight.grad + one
        return None, found


class Modules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + Recomputed.apply(self.inner[0], x, *self.inner[0].parameters())
        x = x + Kept.apply(self.inner[1], x, *self.inner[1].parameters())
        return self.head(x + Aside.apply(self.inner[2], x))


def train_modules(options: dict | None):
    torch.manual_seed(0)
    model = Modules().double()
    if options is None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    else:
        model, optimizer = parallelize(Plan(**options), model, lambda given: torch.optim.Adam(given, lr=0.02))
    seen = []
    for _ in range(3):
        loss = model(torch.randn(5, 5, dtype=torch.float64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for one in (loss, *[weight.grad for weight in model.parameters()]):
            seen.append(getattr(one, "full_tensor", one.clone)().detach())
        optimizer.step()
    return seen + [getattr(one, "full_tensor", one.clone)().detach() for one in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 2}, "parameters": {"*": {}}},
        {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 2},
        {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 3},
        {
            "mesh": {"tp": 2},
            "parameters": {
                "inner.0.0.*": {"tp": Shard(0)},
                "inner.*.2.weight": {"tp": Shard(1)},
                "inner.1.2.bias": {"tp": Shard(0)},
                "inner.2.0.weight": {"tp": Shard(1)},
                "inner.2.2.bias": {"tp": Shard(0)},
                "*": {},
            },
        },
    ],
)
def test_modules_inside_of_functions(options) -> None:
    expected = train_modules(None)
    for found in run_ranks(2, train_modules, options):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
