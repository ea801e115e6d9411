"""autograd Functions that treat a weight as an object: its class, what is on it, its gradient, lists beside it."""

import pytest
import torch
from torch import nn

from vescale_dtensor import Shard
from vescale_dtensor.testing import run_ranks
from vescale_plans import Plan, parallelize


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
