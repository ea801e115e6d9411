"""What a forward does to the arguments of a pipeline's call: what it writes to tensors in place its caller sees, as on
one device; what it changes of lists, dicts and dataclasses is refused."""

import dataclasses
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, ROWS, CALLS = 8, 8, 3


def mask(x, labels):
    labels[labels > 0.5] = -0.25


def column(x, labels):
    x[:, 0] = labels[:, 1]


def by_view(x, labels):
    x[:, 1].zero_()
    x.t().mul_(0.5)


WRITES = {
    "add_": lambda x, labels: x.add_(0.125),
    "both": lambda x, labels: (x.mul_(0.5), labels.sub_(0.25)),
    "mask": mask,
    "masked_fill_": lambda x, labels: labels.masked_fill_(labels < 0, 0.5),
    "a column": column,
    "by a view": by_view,
    "in place of relu": lambda x, labels: F.relu(x, inplace=True),
    "noise": lambda x, labels: x.add_(torch.randn(WIDTH)),
    "zero_": lambda x, labels: labels.zero_(),
    "nothing": lambda x, labels: None,
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Writes before its first block, behind the second, which is of another stage, or behind its last."""

    def __init__(self, write, where):
        super().__init__()
        self.write, self.where = write, where
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, labels):
        h = x
        for at, block in enumerate(self.blocks):
            if at == self.where:
                self.write(x, labels)
                h = x if at == 0 else h
            h = block(h if at else h * 1.0)
        if self.where == len(self.blocks):
            self.write(x, labels)
        return (h - labels).square().mean()




def plan_of(schedule, dp):
    virtual = {"interleaved": 2, "zbv": 2}.get(schedule, 1)
    cuts = [f"blocks.{at}" for at in ((1, 2, 3) if virtual == 2 else (2,))]
    pipeline = vescale.Pipeline(cuts=cuts, microbatches=2, schedule=schedule, virtual=virtual)
    mesh = {"pp": 2} if dp == 1 else {"pp": 2, "dp": dp}
    return vescale.Plan(mesh=mesh, parameters={"*": {}}, pipeline=pipeline)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor


def ran(write, where, plan, trains):
    """trains: None of an evaluation under `inference_mode`, whose batch is made in it."""
    torch.manual_seed(0)
    model = Net(WRITES[write], where)
    if plan is not None:
        model, _ = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
    generator = torch.Generator().manual_seed(0)
    mode = {None: torch.inference_mode, True: torch.enable_grad, False: torch.no_grad}[trains]
    with torch.inference_mode(trains is None):
        x, labels = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    found = []
    for _ in range(CALLS):
        with mode():
            loss = model(x, labels)
            if trains:
                loss.backward()
        gradients = {name: full(each.grad).clone() for name, each in model.named_parameters() if each.grad is not None}
        model.zero_grad()
        found.append((full(loss).detach(), gradients, x.clone(), labels.clone()))
    return found


CASES = [
    (write, where, schedule, dp, trains)
    for write in WRITES
    for where in (0, 2, 4)
    for schedule in ("1f1b", "interleaved", "zbv", "gpipe")
    for dp in (1, 2)
    for trains in (True, False, None)
]


def every(cases):
    return [
        (ran(write, where, None, trains), ran(write, where, plan_of(schedule, dp), trains))
        for write, where, schedule, dp, trains in cases
    ]


@pytest.mark.parametrize("dp", (1, 2))
def test_what_a_forward_writes_its_caller_sees(dp):
    """Of numbers that it draws, alike on all ranks: each microbatch draws its own."""
    cases = slice_of([case for case in CASES if case[3] == dp], fraction=7)
    given = []
    for found in run_ranks(2 * dp, every, cases, timeout=300):
        for case, (wanted, ours) in zip(cases, found, strict=True):
            for (loss, gradients, *batch), (other, others, *whole) in zip(ours, wanted, strict=True):
                if case[0] == "noise":
                    continue
                torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-6, msg=str(case))
                torch.testing.assert_close(batch, whole, rtol=1e-5, atol=1e-6, msg=str(case))
                for name, gradient in gradients.items():
                    torch.testing.assert_close(gradient, others[name], rtol=1e-5, atol=1e-6, msg=f"{case} {name}")
        given.append([(batch, loss) for _, ours in found for loss, _, *batch in ours])
    for one in given[1:]:
        torch.testing.assert_close(one, given[0], rtol=0, atol=0)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    labels: torch.Tensor
    more: Any


def pop(batch, h):
    return batch.pop("labels")


def put(batch, h):
    batch["h"] = h
    return batch["labels"]


def swap(batch, h):
    batch["x"], batch["labels"] = batch["labels"], batch["x"]
    return batch["x"]


def append(batch, h):
    batch["more"].append(h)
    return batch["labels"]


def put_inside(batch, h):
    batch["inside"]["n"] = 2
    return batch["labels"]


def set_field(batch, h):
    batch.more = h
    return batch.labels


def append_to_field(batch, h):
    batch.more.append(h)
    return batch.labels


def append_to_queue(batch, h):
    batch["queue"].append(h)
    return batch["labels"]


def only_read(batch, h):
    return dict(batch).pop("labels")


CHANGES = {
    **dict.fromkeys((pop, put, swap, put_inside), "dict"),
    **dict.fromkeys((append, append_to_field), "list"),
    set_field: "Batch",
    append_to_queue: "deque",
}


class Changes(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, batch):
        h = batch.x if isinstance(batch, Batch) else batch["x"]
        for block in self.blocks:
            h = block(h)
        return (h - self.change(batch, h)).square().mean()


def changed(change):
    torch.manual_seed(0)
    x, labels = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    batch = {"x": x, "labels": labels, "more": [], "inside": {"n": 1, "t": x}, "queue": deque()}
    if change in (set_field, append_to_field):
        batch = Batch(x, labels, [])
    wanted = Changes(change)
    model, _ = vescale.parallelize(plan_of("1f1b", 1), wanted, partial(torch.optim.SGD, lr=0.1))
    try:
        loss = model(batch)
    except vescale.PipelineError as error:
        return error.rule, list(batch) if isinstance(batch, dict) else batch.more
    return loss.item()


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_forward_changes_of_containers_is_refused(change):
    for rule, left in run_ranks(2, changed, change):
        assert f"the forward changes a {CHANGES[change]} that it was given, in argument 0" in rule
        assert left == ([] if change in (set_field, append_to_field) else ["x", "labels", "more", "inside", "queue"])


def test_a_copy_may_be_changed():
    first, second = run_ranks(2, changed, only_read)
    assert first == second > 0


class PutsResults(Net):
    def forward(self, x, labels):
        h = x
        for block in self.blocks:
            h = block(h)
        labels.copy_(h.detach())
        return (h - labels).square().mean() + h.square().mean()


def puts_results():
    torch.manual_seed(0)
    model, _ = vescale.parallelize(plan_of("1f1b", 1), PutsResults(None, 0), partial(torch.optim.SGD, lr=0.1))
    x, labels = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    before = labels.clone()
    with pytest.raises(vescale.PipelineError, match="writes what a module computes to a tensor that it was given"):
        model(x, labels)
    return type(labels) is torch.Tensor and torch.equal(labels, before)


def test_results_that_are_written_to_the_batch_are_refused():
    assert all(run_ranks(2, puts_results))
