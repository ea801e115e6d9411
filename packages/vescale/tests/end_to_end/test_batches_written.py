"""Tensors that a forward is given and writes to in place: its caller sees it, as on one device."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("vescale")

WIDTH, CALLS = 8, 4


def mask(x, labels):
    labels[labels > 0.5] = -0.25


def by_view(x, labels):
    x[:, 1].zero_()
    x.t().mul_(0.5)


def by_out(x, labels):
    torch.clamp(x, -0.5, 0.5, out=x)


WRITES = {
    "add_": lambda x, labels: x.add_(0.125),
    "both": lambda x, labels: (x.mul_(0.5), labels.sub_(0.25)),
    "mask": mask,
    "masked_fill_": lambda x, labels: labels.masked_fill_(labels < 0, 0.5),
    "a row": lambda x, labels: x.__setitem__(0, 0.5),
    "a column": lambda x, labels: x.__setitem__((slice(None), 0), labels[:, 1]),
    "its mean": lambda x, labels: x.sub_(x.mean()),
    "copy_": lambda x, labels: labels.copy_(x.detach()),
    "by a view": by_view,
    "by out=": by_out,
    "in place of relu": lambda x, labels: F.relu(x, inplace=True),
    "+=": lambda x, labels: x.__iadd__(1.0),
    "zero_": lambda x, labels: labels.zero_(),
    "nothing": lambda x, labels: None,
}


class Net(nn.Module):
    def __init__(self, write, where):
        super().__init__()
        self.write, self.where = write, where
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner = Inner(write)

    def forward(self, batch, labels=None):
        x = batch if labels is not None else batch["x"]
        labels = labels if labels is not None else batch["labels"]
        if self.where == "above":
            self.write(x, labels)
        else:
            self.inner(x, labels)
        return (self.second(torch.tanh(self.first(x))) - labels).square().mean()


class Inner(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x, labels):
        self.write(x, labels)
        return x


VIEWS = ("by a view", "a column")


def tried(function, *args):
    """What comes of it, or the name of the error."""
    try:
        return function(*args)
    except (RuntimeError, vescale.ViewError) as error:
        return type(error).__name__


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor


def ran(write, where, rows, given, plan):
    torch.manual_seed(0)
    model = Net(WRITES[write], where)
    if plan is not None:
        model, _ = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
    generator = torch.Generator().manual_seed(0)
    if given == "columns":
        x, labels = torch.randn(rows, 2 * WIDTH, generator=generator).split(WIDTH, 1)
    else:
        x, labels = torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)
    found = []
    for _ in range(CALLS):
        loss = model({"x": x, "labels": labels}) if given == "a dict" else model(x, labels=labels)
        loss.backward()
        found += [full(loss).detach(), *(full(each.grad) for each in model.parameters()), x.clone(), labels.clone()]
        model.zero_grad()
    return found


PLANS = {
    "data": {"mesh": {"dp": 2}, "parameters": {"*": {}}},
    "zero 3": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 3},
    "tensor": {"mesh": {"tp": 2}, "parameters": {"first.weight": {"tp": vescale.Shard(0)}, "*": {}}},
    "both": {
        "mesh": {"dp": 2, "tp": 2},
        "parameters": {"first.weight": {"tp": vescale.Shard(0)}, "first.bias": {"tp": vescale.Shard(0)}, "*": {}},
        "zero": 2,
    },
    "context": {"mesh": {"cp": 2}, "parameters": {"*": {}}, "context_axis": "cp"},
}
CASES = [
    (write, where, rows, given)
    for write in WRITES
    for where in ("above", "inside")
    for rows in (5, 4, 1)
    for given in ("keywords", "a dict", "columns")
]


def every(cases, plan):
    return [
        (
            tried(ran, write, where, rows, given, None),
            tried(ran, write, where, rows, given, plan),
        )
        for write, where, rows, given in cases
    ]


def assert_alike(cases, found):
    """A view that is a copy, by a plan's cuts, is not written to (`ViewError`); what one device refuses is refused."""
    for case, (wanted, ours) in zip(cases, found, strict=True):
        if isinstance(wanted, str) or (isinstance(ours, str) and case[0] in VIEWS):
            assert ours in (wanted, "ViewError"), case
            continue
        for at, (one, other) in enumerate(zip(ours, wanted, strict=True)):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), (case, at, one, other)


@pytest.mark.parametrize("plan", PLANS)
def test_what_a_forward_writes_to_its_batch(plan):
    cases = slice_of(CASES, fraction=7)
    ranks = 4 if plan == "both" else 2
    for found in run_ranks(ranks, every, cases, vescale.Plan(**PLANS[plan]), timeout=300):
        assert_alike(cases, found)


class Above(nn.Module):
    """Goes on with what a module that it called has written to."""

    def __init__(self, write):
        super().__init__()
        self.first, self.inner, self.second = nn.Linear(WIDTH, WIDTH), Inner(WRITES[write]), nn.Linear(WIDTH, WIDTH)
        self.written = Inner(WRITES[write])

    def forward(self, x, labels):
        h, also = self.first(x), self.second(x)
        self.inner(h, also)
        g = torch.tanh(h) * 2
        self.written(g, also)
        return (self.second(g + h) - labels - also).square().mean()


WHOLE = {"tp": vescale.Replicate()}
BOUNDARIES = {
    "of the first input": {"inner": vescale.Boundary(input=WHOLE)},
    "of both": {
        "inner": vescale.Boundary(arguments={"x": WHOLE, "labels": WHOLE}),
        "written": vescale.Boundary(input=WHOLE, arguments={"labels": {"dp": vescale.Replicate()}}),
    },
    "none": {},
}


def above(write, rows, plan):
    torch.manual_seed(0)
    model = Above(write)
    if plan is not None:
        model, _ = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)
    found = []
    for _ in range(CALLS):
        loss = model(x, labels)
        loss.backward()
        found += [full(loss).detach(), *(full(each.grad) for each in model.parameters())]
        model.zero_grad()
    return found


def every_above(cases):
    first = {
        "first.weight": {"tp": vescale.Shard(0)}, "first.bias": {"tp": vescale.Shard(0)},
        "second.weight": {"tp": vescale.Shard(0)}, "second.bias": {"tp": vescale.Shard(0)}, "*": {},
    }  # fmt: skip
    mesh = {"dp": 2, "tp": 2}
    plans = {at: vescale.Plan(mesh=mesh, parameters=first, boundaries=each) for at, each in BOUNDARIES.items()}
    return [
        (tried(above, write, rows, None), tried(above, write, rows, plans[boundaries]))
        for write, rows, boundaries in cases
    ]


def test_what_a_module_writes_to_its_input_those_around_it_see():
    cases = [
        (write, rows, boundaries)
        for write in WRITES
        for rows in (5, 4)
        for boundaries in BOUNDARIES
    ]
    cases = slice_of(cases, fraction=3)
    for found in run_ranks(4, every_above, cases, timeout=300):
        assert_alike(cases, found)


def evaluated(write, where, rows, plan, made_in):
    """Batches are made in the mode, as a loader's are that is gone through in it, or before."""
    torch.manual_seed(0)
    model = Net(WRITES[write], where) if where != "boundary" else Above(write)
    if plan is not None:
        model, _ = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(made_in):
        x, labels = torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)
    found = []
    with torch.inference_mode():
        for _ in range(CALLS):
            found += [full(model(x, labels)), x, labels]
            found = [each.clone() for each in found]
    return found


def every_evaluated(cases):
    first = {f"{name}.{kind}": {"tp": vescale.Shard(0)} for name in ("first", "second") for kind in ("weight", "bias")}
    plans = {
        "boundary": vescale.Plan(
            mesh={"dp": 2, "tp": 2}, parameters=first | {"*": {}}, boundaries=BOUNDARIES["of both"] | CUT
        ),
        **dict.fromkeys(("above", "inside"), vescale.Plan(mesh={"dp": 4}, parameters={"*": {}})),
    }
    return [
        (tried(evaluated, *case[:3], None, case[3]), tried(evaluated, *case[:3], plans[case[1]], case[3]))
        for case in cases
    ]


CUT = {"written": vescale.Boundary(input={"tp": vescale.Shard(1)}, arguments={"labels": WHOLE})}


def test_under_inference_mode():
    cases = [
        (write, where, rows, made_in)
        for write in WRITES
        for where in ("above", "inside", "boundary")
        for rows in (5, 4)
        for made_in in (True, False)
    ]
    cases = slice_of(cases, fraction=3)
    for found in run_ranks(4, every_evaluated, cases, timeout=300):
        assert_alike(cases, found)
