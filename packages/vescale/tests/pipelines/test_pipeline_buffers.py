"""Batch normalization under a pipeline: statistics of each microbatch, as one device has them that accumulates."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

COUNT, ROWS, STEPS = 4, 3, 4
OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """Convolutions with batch normalization before and after the cut; one norm with a cumulative average."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, image, label):
        return F.cross_entropy(self.head(self.second(self.first(image)).mean((2, 3))), label)


def batches():
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield torch.randn(COUNT * ROWS, 2, 6, 6, generator=generator), torch.randint(3, (12,), generator=generator)


def on_one_device(model):
    optimizer = OPTIMIZER(model.parameters())
    losses = []
    for images, labels in batches():
        total = 0
        for image, label in zip(images.chunk(COUNT), labels.chunk(COUNT)):
            loss = model(image, label) * (1 / COUNT)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    model.eval()
    with torch.no_grad():
        parts = zip(images.chunk(COUNT), labels.chunk(COUNT))
        return [*losses, sum(model(image, label) * (1 / COUNT) for image, label in parts).item()]


def compared(kind, virtual):
    """Per rank: losses here and on one device, what this rank holds, and what of it is different."""
    torch.manual_seed(0)
    one = Net()
    cuts = ("second",) if virtual == 1 else ("first.1", "second", "head")
    plan = vescale.Plan(
        mesh={"pp": 2},
        parameters={"*": {}},
        pipeline=vescale.Pipeline(cuts=cuts, schedule=kind, microbatches=COUNT, virtual=virtual),
    )
    model, optimizer = vescale.parallelize(plan, copy.deepcopy(one), OPTIMIZER)
    losses = []
    for images, labels in batches():
        loss = model(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(model(images, labels).item())
    wanted_losses = on_one_device(one)
    wanted = one.state_dict()
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}
    different = [name for name, value in whole.items() if not torch.equal(value, wanted[name])]
    return losses, wanted_losses, sorted(whole), different


@pytest.mark.parametrize(("kind", "virtual"), [("1f1b", 1), ("zbv", 2)])
def test_parameters_and_statistics_are_bitwise_those_of_accumulation(kind, virtual):
    held = []
    for losses, wanted, names, different in run_ranks(2, compared, kind, virtual, timeout=120):
        assert losses == wanted and different == []
        held += names
    assert sorted(held) == sorted(Net().state_dict())  # each by one rank: what is saved is never stale
