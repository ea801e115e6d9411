"""A backward that raises and is caught: what had come by then are gradients, as on one device, and go with them."""

import contextlib

import pytest
import torch
from torch import nn

from vescale_plans import Plan, Precision, parallelize
from vescale_plans._zero import units
from vescale_testkit import run_ranks

PLANS = {
    **{f"zero {zero}": {"zero": zero} for zero in range(4)},
    "precision": {"precision": Precision(torch.bfloat16, torch.float32)},
}


class Boom(RuntimeError):
    """Out of memory, say."""


def fail(gradient):
    raise Boom


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(4)])
        self.head = nn.Linear(7, 3)
        self.fails_at = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(self.blocks):
            x = x + block(x).tanh()
            if k == self.fails_at:
                x.register_hook(fail)
        return self.head(x)


def loss_of(model, seed: int) -> torch.Tensor:
    return model(torch.randn(6, 7, generator=torch.Generator().manual_seed(seed))).square().mean()


def whole(tensor):
    return None if tensor is None else getattr(tensor, "full_tensor", tensor.clone)().detach().clone()


def gradients(model):
    return [whole(one.grad) for one in model.parameters()]


def raising(model, seed: int, at: int) -> None:
    model.fails_at = at
    loss = loss_of(model, seed)
    model.fails_at = None
    with pytest.raises(Boom):
        loss.backward()


def dropped(model, optimizer):
    """Of two batches that raise, gradients are dropped in each of the ways that there are."""
    ways = [
        optimizer.zero_grad,
        model.zero_grad,
        lambda: [setattr(one, "grad", None) for one in model.parameters()],
        lambda: optimizer.zero_grad(set_to_none=False),
    ]
    for seed, way in enumerate(ways):
        raising(model, seed, at=1)
        way()
        loss_of(model, seed).backward()
        yield gradients(model)
        raising(model, seed, at=2)
        yield gradients(model)
        way()
        loss_of(model, seed + 1).backward()
        optimizer.step()
        optimizer.zero_grad()


def kept(model, optimizer):
    """What came before is a part of the next step, whatever is done first."""
    raising(model, 0, at=1)
    yield gradients(model)
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    raising(model, 2, at=0)
    optimizer.step()
    yield [model(torch.ones(6, 7)).sum().item()]
    optimizer.zero_grad()
    raising(model, 3, at=2)
    with torch.no_grad():
        model.blocks[0].weight.mul_(0.5)  # blocks that were gathered are at rest, for one writes to them
    yield [model(torch.ones(6, 7)).sum().item()]
    loss_of(model, 3).backward()
    optimizer.step()
    optimizer.zero_grad()


def again(model, optimizer):
    """The same graph, once more."""
    times = []

    def once(gradient):
        times.append(gradient)
        if len(times) == 1:
            raise Boom

    for _ in range(2):
        times.clear()
        loss = loss_of(model, 0)
        handle = model.blocks[1].weight.register_hook(once)
        with pytest.raises(Boom):
            loss.backward(retain_graph=True)
        loss.backward()
        handle.remove()
        yield gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def accumulated(model, optimizer):
    """Raised in a backward whose gradients stay partial, and in the one that sums them."""
    apart = getattr(model, "no_sync", contextlib.nullcontext)
    for at in range(3):
        with apart():
            loss_of(model, 0).backward()
            raising(model, 1, at)
        raising(model, 2, at)
        loss_of(model, 3).backward()
        yield gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def outside(model, optimizer):
    """A loss that is a plain tensor."""
    for at in range(3):
        model.fails_at = at
        loss = loss_of(model, at)
        plain = getattr(loss, "full_tensor", loss.clone)()
        model.fails_at = None
        with pytest.raises(Boom):
            (plain * 2).backward()
        yield gradients(model)
        optimizer.zero_grad()
        loss_of(model, at).backward()
        optimizer.step()
        optimizer.zero_grad()


def asked(model, optimizer):
    """torch.autograd.grad, which leaves no gradients."""
    for at in range(3):
        model.fails_at = at
        loss = loss_of(model, at)
        model.fails_at = None
        with pytest.raises(Boom):
            torch.autograd.grad(loss, [model.blocks[at].weight, model.blocks[0].bias])
        yield gradients(model)
        loss_of(model, at).backward()
        optimizer.step()
        optimizer.zero_grad()


def hooked(model, optimizer):
    """A user's hook on a gradient that is there raises."""
    handle = model.head.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(Boom):
        loss_of(model, 0).backward()
    handle.remove()
    optimizer.zero_grad()
    for seed in range(2):
        loss_of(model, seed).backward()
        yield gradients(model)
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS = [dropped, kept, again, accumulated, outside, asked, hooked]


def run(options: dict | None, programs: list):
    units.LEAST_BUCKET_BYTES, kept = 0, units.LEAST_BUCKET_BYTES  # several buckets at each stage
    try:
        found = []
        for program in programs:
            torch.manual_seed(0)
            model, optimizer = Net(), lambda given: torch.optim.SGD(given, lr=0.2, momentum=0.9)
            if options is None:
                optimizer = optimizer(model.parameters())
            else:
                model, optimizer = parallelize(Plan(mesh={"dp": 2}, parameters={"*": {}}, **options), model, optimizer)
            found.append([*program(model, optimizer), [whole(one) for one in model.parameters()]])
        return found
    finally:
        units.LEAST_BUCKET_BYTES = kept


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_one_devices_numbers(options):
    tolerance = {"rtol": 0.1, "atol": 0.02} if "precision" in options else {"rtol": 1e-4, "atol": 1e-6}
    programs = [one for one in PROGRAMS if one is not asked or "precision" not in options]
    expected = run(None, programs)
    for rank in run_ranks(2, run, options, programs):
        for found, numbers in zip(rank, expected, strict=True):
            torch.testing.assert_close(found, numbers, **tolerance)
