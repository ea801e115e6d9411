"""A forward that goes by the identity of a batch, which its caller holds."""

import gc
import weakref

import pytest
import torch
from torch import nn

from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks


class Cached(nn.Module):
    """Statistics of each batch, computed once, of the first of two inputs; and tensors that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cache, self.seen = nn.Linear(6, 3), {}, {}

    def forward(self, x, batch=None):
        if id(x) not in self.cache:
            self.cache[id(x)] = x.mean(0, keepdim=True), x.abs().max().item()
        mean, most = self.cache[id(x)]
        other = x if batch is None else batch["other"]
        self.seen.setdefault(id(other), len(self.seen))
        return self.layer((x - mean) / most) + other.sum() * self.seen[id(other)]


def loop(model, optimizer):
    held = [torch.randn(7, 6, generator=torch.Generator().manual_seed(i)) * (i + 1) + i for i in range(3)]
    others = [torch.arange(float(5 + i)) for i in range(2)]
    losses = []
    for step in range(9):
        x, other = held[step % 3], others[step % 2]
        if step == 6:
            x.mul_(2)  # the same object, of other values
            other.numpy()[0] = 3.0
        with torch.set_grad_enabled(step % 4 != 3):
            loss = (model(x, batch={"other": other}) - 1).square().mean()
        if step % 4 != 3:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    two = model(held[0]).square().mean() + model(held[0]).mean()  # two forwards of one batch, then their backward
    two.backward()
    return [*losses, two.item()], len(model.cache), len(model.seen)


def run(options: dict | None):
    torch.manual_seed(0)
    model, made = Cached(), lambda given: torch.optim.SGD(given, lr=0.1)
    if options is None:
        return loop(model, made(model.parameters()))
    model, optimizer = parallelize(Plan(parameters={"*": {}}, **options), model, made)
    found = loop(model, optimizer)
    model.cache.clear()  # keyed by what is gone now, whose identity another tensor may get, on one rank alone
    model.seen.clear()
    x = torch.randn(7, 6)
    memory = weakref.ref(x)
    model(x)
    written = x.clone()
    model(written).sum().backward()
    del x
    gc.collect()
    assert memory() is None  # nothing holds a batch that its caller has let go
    return found


@pytest.mark.parametrize("options", [{"mesh": {"dp": 1}}, {"mesh": {"dp": 2}}, {"mesh": {"dp": 2}, "zero": 3}])
def test_one_devices_numbers(options):
    (losses, *counts) = run(None)
    for found, *seen in run_ranks(options["mesh"]["dp"], run, options):
        assert seen == counts
        assert found == pytest.approx(losses, rel=1e-4)
