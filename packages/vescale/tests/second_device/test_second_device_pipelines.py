"""Pipelines on the second device: what the host needs of labels, scales and norms, and waits for."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vescale
from gpu.training import STAGED, rehearsed_through_host
from sweeps.training_cases import CASES as TRAININGS
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "vescale_testkit.second")

ROWS, CLASSES, STEPS = 8, 6, 4


class Net(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(4))
        self.unused = nn.Linear(CLASSES, CLASSES)
        self.loss = loss

    def forward(self, x, labels):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.loss(x, labels)


def plain(x, labels):
    return F.cross_entropy(x, labels)


def smoothed(x, labels):
    return F.cross_entropy(x, labels, label_smoothing=0.1)


def by_class(x, labels):
    weight = torch.arange(CLASSES, device=labels.device, dtype=x.dtype)  # class 0 counts for nothing
    return F.cross_entropy(x, labels, weight=weight)


def of_two(x, labels):
    return F.cross_entropy(x, labels) + 0.1 * F.cross_entropy(2 * x, labels)


def batch(step):
    """Of four microbatches the second, and in every other step the first, have no label that counts."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, CLASSES, generator=generator)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    return x, labels.index_fill(0, torch.tensor([2, 3, 5] if step % 2 else [0, 1, 2, 3]), -100)


def train(loss_of, order, scales, plan=None):
    """Losses, norms and whole parameters; where the host waited in the last step, but for clipping by a norm other than
    two, in which torch looks at the numbers itself."""
    torch.manual_seed(0)
    model, waits = Net(loss_of), {}
    make = partial(torch.optim.SGD, lr=0.1)
    model, optimizer = (model, make(model.parameters())) if plan is None else vescale.parallelize(plan, model, make)
    seen = []
    for step in range(STEPS):
        inputs = [tensor if plan is None else tensor.to("second") for tensor in batch(step)]
        watch = _watched() if plan is not None else torch.enable_grad()
        with watch as found:
            loss = model(*inputs)
            (loss * scales[step]).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=order)
            optimizer.step()
            optimizer.zero_grad()
        waits = dict(found.sites) if plan is not None else {}
        seen.append((loss.detach(), norm))
    numbers = [(float(loss), float(norm)) for loss, norm in seen]
    whole = {n: _whole(p) for n, p in model.named_parameters()}
    return numbers, whole, waits


def _watched():
    from vescale_testkit.second import host_waits

    return host_waits()


def _whole(parameter):
    parameter = parameter.detach()
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).cpu()


def staged(schedule, **mesh):
    pipeline = vescale.Pipeline(axis="pp", cuts=("blocks.2",), schedule=schedule, microbatches=4)
    return vescale.Plan(mesh={"pp": 2, "dp": 1} | mesh, parameters={"*": {}}, pipeline=pipeline)


CASES = [
    (plain, "1f1b", 2.0, {}, 0),
    (plain, "zb-h1", 1.0, {}, 0),
    (plain, "gpipe", float("inf"), {"dp": 2}, 1),  # whether another rank has used what no rank uses
    (smoothed, "1f1b", 2.0, {}, 0),
    (of_two, "1f1b", 2.0, {}, 1),  # compared by the host, which is an error where they differ
    (by_class, "1f1b", 2.0, {}, 1),
]


@pytest.mark.parametrize("loss_of, schedule, order, mesh, reads", CASES)
@pytest.mark.parametrize("scales", [(1.0,) * STEPS, (0.5, 0.5, 3.0, 1 / 3)])
def test_ignored_labels_scales_and_norms_are_one_devices_without_waits(loss_of, schedule, order, mesh, reads, scales):
    numbers, wanted, _ = train(loss_of, order, scales)
    plan = staged(schedule, **mesh)
    for rank in run_ranks(2 * plan.mesh["dp"], train, loss_of, order, scales, plan, device="second", timeout=240):
        found, parameters, waits = rank
        for pair, other in zip(found, numbers):
            assert pair == pytest.approx(other, rel=2e-6)
        for name, value in parameters.items():
            assert (value - wanted[name]).norm() <= 1e-6 * wanted[name].norm(), name
        assert sum(waits.values()) <= reads, waits


class Shared(nn.Module):
    """Two parameters whose gradients autograd gives in one tensor."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x) + (self.one + self.other)).square().mean()


@pytest.mark.parametrize("device", ["cpu", "second"])
def test_a_scaled_backward_multiplies_gradients_that_share_memory_once(device):
    def gradients(plan):
        torch.manual_seed(0)
        model = Shared()
        if plan is not None:
            model, _ = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        (model(x if plan is None else x.to(device)) / 4).backward()
        return {n: _whole(p.grad) for n, p in model.named_parameters()}

    pipeline = vescale.Pipeline(axis="pp", cuts=("last",), schedule="1f1b", microbatches=1)
    plan = vescale.Plan(mesh={"pp": 2, "dp": 1}, parameters={"*": {}}, pipeline=pipeline)
    wanted = gradients(None)
    for found in run_ranks(2, gradients, plan, device=device, timeout=240):
        for name, value in found.items():
            assert torch.allclose(value, wanted[name], rtol=1e-6, atol=1e-8), name


class Placing(nn.Module):
    """User code between the stages asks where activations and weights lie, and makes tensors there, in every way."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES)

    def forward(self, x):
        was, kind = x.device, x.device.type
        weighed = self.last.weight.new_ones(CLASSES) + torch.arange(CLASSES, device=self.first.weight.device)
        x = torch.tanh(self.first(x))
        filled = torch.zeros(x.shape, device=x.device)
        filled[:, 1:] = x[:, 1:]
        places = [x.device, filled.device, self.first.weight.device, self.last.weight.device]
        places += [y.device for y in (x.to(kind), x.to(f"{kind}:0"), x.to(device=kind), x.to(was), x.to(weighed))]
        places += [x.to(torch.float64).device, x.cpu().to(was).device, (filled + x).device]
        assert places == [was] * len(places), places
        assert x.cpu().device == x.to("cpu").device == torch.device("cpu")
        filled = filled * torch.arange(1, CLASSES + 1, device=filled.device) / CLASSES
        return self.last(x.cpu().to(x.device) + filled.to(kind) * weighed / CLASSES).square().mean()


@pytest.mark.parametrize("device", ["cpu", "second"])
def test_user_code_on_every_stage_sees_the_device_of_other_stages(device):
    """The model is built on the host, and is told by `parallelize` where to lie."""

    def parameters(plan):
        torch.manual_seed(0)
        model = Placing()
        make = partial(torch.optim.SGD, lr=0.1)
        model, optimizer = (model, make(model.parameters())) if plan is None else vescale.parallelize(plan, model, make)
        for step in range(3):
            x = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(step))
            model(x if plan is None else x.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {n: _whole(p) for n, p in model.named_parameters()}

    pipeline = vescale.Pipeline(axis="pp", cuts=("last",), schedule="1f1b", microbatches=2)
    plan = vescale.Plan(mesh={"pp": 2, "dp": 1}, parameters={"*": {}}, pipeline=pipeline)
    wanted = parameters(None)
    for found in run_ranks(2, parameters, plan, device=device, timeout=240):
        assert found
        for name, value in found.items():
            assert (value - wanted[name]).norm() <= 1e-6 * wanted[name].norm(), name


@pytest.mark.parametrize("name", slice_of(STAGED, 1))
def test_transfers_go_through_the_host_where_ranks_share_a_device(name):
    """As `make gpu` has them on one GPU: gloo sends no tensors of it."""
    found = rehearsed_through_host(TRAININGS[name])
    assert found["holds"] and found["collectives"].endswith("through the host"), found
