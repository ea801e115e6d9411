"""Steps after a backward that made a graph, which keeps blocks gathered: what is written stays."""

import pytest
import torch
from torch import nn

from vescale_plans import Plan, Precision, parallelize
from vescale_testkit import run_ranks

OPTIMIZERS = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.3),
    "adam": lambda given: torch.optim.Adam(given, lr=0.03),
    "muon": lambda given: torch.optim.Muon([one for one in given if one.ndim == 2], lr=0.05),
}
LOW = Precision(torch.float32, torch.float64)
PLANS = {
    "zero 3": (3, {"zero": 3}),
    "precision, one rank": (1, {"precision": LOW}),
    "precision, zero 1": (2, {"precision": LOW, "zero": 1}),
    "precision, zero 3": (2, {"precision": LOW, "zero": 3}),
}


def graph_kept(model, optimizer, loss):
    loss.backward(create_graph=True)
    yield loss
    optimizer.step()


def penalty(model, optimizer, loss):
    loss.backward(create_graph=True)
    optimizer.zero_grad()
    (loss + 0.1 * loss.square()).backward(retain_graph=True)
    optimizer.step()
    yield model(torch.ones(7, 5, dtype=torch.float64)).sum()


def twice(model, optimizer, loss):
    loss.backward(create_graph=True)
    optimizer.step()
    optimizer.step()


def slope(model, optimizer, loss):
    """Through the graph that a backward made, after parameters were looked at and a block ran again."""
    for again in range(2):
        x = torch.linspace(-1, 1, 35, dtype=torch.float64).view(7, 5).requires_grad_()
        (along,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        yield sum(one.detach().square().sum() for one in model.parameters())
        if again:
            yield model(x * 2).sum()
        (along.square().mean() + loss).backward(retain_graph=True)
        optimizer.step() if again else None


def by_hand(model, optimizer, loss):
    loss.backward(create_graph=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=1e-9)  # in the parameters' own dtype
            parameter.sub_(parameter.grad, alpha=0.1)


def evaluated(model, optimizer, loss):
    loss.backward(create_graph=True)
    optimizer.step()
    with torch.no_grad():
        yield model(torch.ones(7, 5, dtype=torch.float64)).sum()
    optimizer.step()


def run(options: dict | None, kind: str):
    found = []
    for program in (graph_kept, penalty, twice, slope, by_hand, evaluated):
        torch.manual_seed(0)
        model, made = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double(), OPTIMIZERS[kind]
        if options is None:
            optimizer = made(model.parameters())
        else:
            model, optimizer = parallelize(Plan(parameters={"*": {}}, **options), model, made)
        numbers, kept = [], []
        for seed in range(4):
            x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            loss = model(x).square().mean()
            numbers.append(loss.item())
            kept += program(model, optimizer, loss) or ()
            model.zero_grad()
        numbers += [one.item() for one in kept]
        found.append((numbers, [(getattr(one, "full_tensor", one.clone)()).detach() for one in model.parameters()]))
    return found


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("ranks, options", PLANS.values(), ids=PLANS)
def test_one_devices_numbers(ranks, options, kind):
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if "precision" in options else {"rtol": 1e-6, "atol": 1e-8}
    expected = run(None, kind)
    for found in run_ranks(ranks, run, {"mesh": {"dp": ranks}, **options}, kind):
        torch.testing.assert_close(found, expected, **tolerance)
