"""Parameters of one element, cut over an axis: C++ hears of them as of numbers, in regions too."""

import pytest
import torch
from torch import nn

from vescale_dtensor import Shard
from vescale_dtensor.testing import run_ranks
from vescale_plans import Plan, parallelize


class Critic(nn.Module):
    """One output: its bias, its scale and its norm are of one element each."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.score = nn.Linear(4, 1)
        self.again = nn.Linear(1, 1)
        self.slope = nn.PReLU()
        self.norm = nn.LayerNorm(1)
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x):
        y = self.slope(self.again(self.score(torch.tanh(self.up(x))))) * self.scale
        return y + self.norm(y)


def trained(plan, penalty):
    torch.manual_seed(0)
    model = Critic().double()
    if plan is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    else:
        model, optimizer = parallelize(plan, model, lambda p: torch.optim.AdamW(p, lr=0.1), mode="static")
    seen = []
    for _ in range(4):
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=penalty)
        loss = (model(x) - 1).square().mean()
        if penalty:
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + gradient.square().sum()
        loss.backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen + [p.detach().full_tensor() if plan is not None else p.detach() for p in model.parameters()]


CUT = {"score.bias": {"tp": Shard(0)}, "again.*": {"tp": Shard(0)}, "slope.weight": {"tp": Shard(0)},
       "norm.*": {"tp": Shard(0)}, "scale": {"tp": Shard(0)}, "*": {}}  # fmt: skip
PLANS = {"tp": Plan(mesh={"tp": 2}, parameters=CUT)}
PLANS |= {f"zero{z}": Plan(mesh={"dp": 2, "tp": 2}, parameters=CUT, zero=z) for z in (0, 3)}


@pytest.mark.parametrize("penalty", [False, True], ids=["plain", "penalty"])
@pytest.mark.parametrize("name", PLANS)
def test_parameters_of_one_element_in_static_calls_equal_one_device(name, penalty):
    alone = trained(None, penalty)
    for ranks in run_ranks(2 if name == "tp" else 4, trained, PLANS[name], penalty):
        torch.testing.assert_close(ranks, alone)
