"""What blocks leave in objects that are no modules: every stage finds it, as on one device, or every rank raises."""

import copy
import dataclasses
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_pipeline import PipelineError
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, COUNT, ROWS, STEPS = 8, 4, 2, 3
OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ELSEWHERE = []


@dataclasses.dataclass
class Totals:
    """As a dataclass that compares by value, it has no hash."""

    loss: object = 0.0
    calls: int = 0
    parts: list = dataclasses.field(default_factory=list)


class Block(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.linear, self.held = nn.Linear(WIDTH, WIDTH), held

    def forward(self, x):
        x = x + torch.tanh(self.linear(x))
        self.leave(x)
        return x


class Lists(Block):
    def leave(self, x):
        self.held.parts.append(x.square().mean())


class Numbers(Block):
    def leave(self, x):
        self.held.loss = self.held.loss + x.square().mean()
        self.held.calls += 1


class Nested(Block):
    def leave(self, x):
        self.held.inner[0].loss = x.square().mean()


class Counted(Block):
    """Counts its calls in a tensor that is no buffer, written in place, and in what containers hold."""

    def __init__(self, held):
        super().__init__(held)
        self.seen, self.last, self.inner = torch.zeros(()), deque(maxlen=5), {"calls": [0]}

    def forward(self, x):
        self.seen += 1
        self.last.append(0)
        self.inner["calls"][0] += 1
        return super().forward(x) * (1 + 0.01 * self.seen + 0.02 * len(self.last) + 0.03 * self.inner["calls"][0])

    def leave(self, x):
        pass


class Global(Block):
    def leave(self, x):
        ELSEWHERE.append(x.square().mean())


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.held = SimpleNamespace(inner=[Totals()]) if kind is Nested else Totals()
        self.blocks = nn.ModuleList(kind(self.held) for _ in range(4))

    def forward(self, x, y):
        ELSEWHERE.clear()
        if isinstance(self.held, Totals):
            self.held.parts.clear()
            self.held.loss, self.held.calls = 0.0, 0
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y) + 0.1 * self.left(x)

    def left(self, x):
        if isinstance(self.held, SimpleNamespace):
            return self.held.inner[0].loss
        mean = self.held.loss / self.held.calls if self.held.calls else 0.0
        return mean + sum(self.held.parts) + sum(ELSEWHERE)


class Reader(Block):
    """Takes what the block before it left in a list of the module's file."""

    def forward(self, x):
        x = super().forward(x + ELSEWHERE[-1] if ELSEWHERE else x)
        ELSEWHERE.append(x.mean())
        return x

    def leave(self, x):
        pass


class Chain(Model):
    def left(self, x):
        return x.abs().mean()


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, COUNT * ROWS, WIDTH, generator=generator).unbind() for _ in range(STEPS)]


def trained(model, optimizer, parts):
    losses = []
    for x, y in batches():
        total = 0.0
        for pair in zip(x.chunk(parts), y.chunk(parts)):
            loss = model(*pair) * (1 / parts)
            loss.backward()
            total += loss.detach()
        losses.append(float(total))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compared(build, kind, cuts, schedule, virtual):
    torch.manual_seed(0)
    one = build(kind)
    pipeline = vescale.Pipeline(cuts=cuts, schedule=schedule, microbatches=COUNT, virtual=virtual)
    plan = vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, pipeline=pipeline)
    model, optimizer = vescale.parallelize(plan, copy.deepcopy(one), OPTIMIZER)
    try:
        losses = trained(model, optimizer, 1)
    except PipelineError as error:
        return str(error)
    wanted = trained(one, OPTIMIZER(one.parameters()), COUNT)
    expected = dict(one.named_parameters())
    different = [n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), expected[n])]
    return losses == wanted and not different


PLANS = [(("blocks.2",), "1f1b", 1), (("blocks.1", "blocks.2", "blocks.3"), "zbv", 2)]


@pytest.mark.parametrize("kind", [Lists, Numbers, Nested, Counted])
@pytest.mark.parametrize(("cuts", "schedule", "virtual"), PLANS)
def test_what_blocks_leave_in_an_object_is_there_on_every_stage(kind, cuts, schedule, virtual):
    assert run_ranks(2, compared, Model, kind, cuts, schedule, virtual, timeout=120) == [True, True]


@pytest.mark.parametrize(("build", "kind", "taker"), [(Model, Global, "add"), (Chain, Reader, "blocks.")])
@pytest.mark.parametrize(("cuts", "schedule", "virtual"), PLANS)
def test_what_leaves_a_block_by_a_global_list_is_refused(build, kind, taker, cuts, schedule, virtual):
    first, second = run_ranks(2, compared, build, kind, cuts, schedule, virtual, timeout=120)
    assert first == second and "left this module neither as its result nor in the model" in first
    assert first.startswith(f"pipeline: {taker}")


class Flags(Model):
    """Its dropout and the blocks that it calls are changed from call to call."""

    def __init__(self, kind):
        super().__init__(kind)
        self.drop, self.rate, self.skips = nn.Dropout(0.0), 0.0, False

    def forward(self, x, y):
        for i, block in enumerate(self.blocks):
            if not (self.skips and i == 3):
                x = F.dropout(self.drop(block(x)), self.rate, self.training)
        return F.mse_loss(x, y)


def changed_between_calls(cuts, schedule, virtual):
    torch.manual_seed(0)
    one = Flags(Nested)
    pipeline = vescale.Pipeline(cuts=cuts, schedule=schedule, microbatches=COUNT, virtual=virtual)
    plan = vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, pipeline=pipeline)
    model, optimizer = vescale.parallelize(plan, copy.deepcopy(one), OPTIMIZER)
    found = []
    for trained_model, stepper, parts in ((model, optimizer, 1), (one, OPTIMIZER(one.parameters()), COUNT)):
        torch.manual_seed(5)
        losses = []
        for p, rate, skips in ((0.0, 0.0, False), (0.2, 0.0, False), (0.3, 0.1, True), (0.0, 0.2, False)):
            trained_model.drop.p, trained_model.rate = p, rate
            trained_model.skips = skips and virtual == 1  # elsewhere the block begins a stage
            losses += trained(trained_model, stepper, parts)
        found.append(losses)
    return found[0] == found[1]


@pytest.mark.parametrize(("cuts", "schedule", "virtual"), PLANS)
def test_what_decides_a_forward_may_change_between_calls(cuts, schedule, virtual):
    assert run_ranks(2, changed_between_calls, cuts, schedule, virtual, timeout=120) == [True, True]
