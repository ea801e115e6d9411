"""Blocks with a list of experts that write state of their own in their forward, against one device."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_dtensor import Replicate, Shard
from vescale_plans import Plan, PlanError, expert_load
from vescale_testkit import raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, INNER, EXPERTS, CHOSEN, VOCABULARY, BATCH, POSITIONS = 16, 24, 4, 2, 32, 8, 3

# The first: `torch.where` of one argument has no rule, and gathers. The second: that the block computes on the batch.
pytestmark = pytest.mark.filterwarnings("ignore:where has no rule", "ignore:vescale_plans. the block of")


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, rows):
        return self.w2(F.silu(self.w1(rows)))


def loads(chosen):
    return torch.bincount(chosen.flatten(), minlength=EXPERTS).double()


class Block(nn.Module):
    """Sigmoid scores with a correction, as DeepSeek-V3's; what it writes is its subclasses' business."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def scores(self, rows):
        return self.gate(rows).sigmoid()

    def write(self, scores, chosen):
        pass

    def forward(self, x):
        rows = x.flatten(0, 1)
        scores = self.scores(rows)
        chosen = (scores + self.bias).topk(CHOSEN).indices
        shares = scores.gather(1, chosen)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            if token.numel():
                out.index_add_(0, token, expert(rows[token]) * shares[token, slot, None])
        self.write(scores, chosen)
        return x + out.view_as(x)

    def kept(self):
        return {"bias": self.bias}


class InPlace(Block):
    @torch.no_grad()
    def write(self, scores, chosen):
        self.bias += 0.02 * torch.sign(loads(chosen).mean() - loads(chosen))


class ThroughData(Block):
    def write(self, scores, chosen):
        self.bias.data.mul_(0.9).add_(0.1 * scores.detach().mean(0))


class Replaced(Block):
    def write(self, scores, chosen):
        self.bias = self.bias + 0.02 * torch.sign(loads(chosen).mean() - loads(chosen))


class Training(InPlace):
    def write(self, scores, chosen):
        if self.training:
            super().write(scores, chosen)


class Recording(InPlace):
    """Writes while gradients are recorded, which the first look at a call does not."""

    def write(self, scores, chosen):
        if torch.is_grad_enabled():
            super().write(scores, chosen)


class Late(InPlace):
    """Writes from its fourth call on."""

    calls = 0

    def write(self, scores, chosen):
        self.calls += 1
        if self.calls > 3:
            super().write(scores, chosen)


class Counting(Block):
    """Nothing depends on it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(EXPERTS))

    def write(self, scores, chosen):
        self.count += loads(chosen)

    def kept(self):
        return {"count": self.count}


class Attribute(Block):
    total = 0.0

    def write(self, scores, chosen):
        self.total = self.total + scores.detach().sum(0)

    def kept(self):
        return {"total": self.total}


class Numbers(Block):
    """How often it was called scales what it gives; a float is read from the scores."""

    calls, mean = 0, 0.0

    def scores(self, rows):
        self.calls += 1
        return super().scores(rows) * (1 + 0.1 * self.calls)

    def write(self, scores, chosen):
        self.mean = 0.5 * self.mean + 0.5 * scores.mean().item()

    def kept(self):
        return {"calls": self.calls, "mean": self.mean}


class Stats:
    def __init__(self):
        self.seen, self.by_call = 0, {}


class Containers(Block):
    def __init__(self):
        super().__init__()
        self.history, self.stats = [], Stats()

    def write(self, scores, chosen):
        self.history.append(loads(chosen))
        self.stats.seen += chosen.numel()
        self.stats.by_call[len(self.history)] = scores.detach().amax(0)

    def kept(self):
        seen = {f"seen {key}": one for key, one in self.stats.by_call.items()}
        return {"seen": self.stats.seen, **seen, **{f"call {i}": one for i, one in enumerate(self.history)}}


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, EXPERTS)
        self.register_buffer("average", torch.full((EXPERTS,), 0.5))

    def forward(self, rows):
        scores = self.linear(rows).sigmoid()
        self.average.mul_(0.8).add_(0.2 * scores.detach().mean(0))
        return scores - 0.5 * self.average


class InTheRouter(Block):
    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def scores(self, rows):
        return self.gate(rows)

    def kept(self):
        return {"average": self.gate.average}


class Auxiliary(Block):
    """Its loss is an attribute, which the model reads."""

    aux = None

    def write(self, scores, chosen):
        self.aux = EXPERTS * (F.one_hot(chosen, EXPERTS).double().mean((0, 1)) * scores.mean(0)).sum()

    def kept(self):
        return {"aux": self.aux}


class Dense(Block):
    """Every expert takes every token; no code depends on values, so that the block's lines could become static."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(EXPERTS))

    def forward(self, x):
        scores = (self.gate(x) + self.average).softmax(-1)
        self.average.mul_(0.5).add_(0.5 * scores.detach().mean((0, 1)))
        return x + sum(expert(x) * scores[..., i : i + 1] for i, expert in enumerate(self.experts))

    def kept(self):
        return {"average": self.average}


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([block()])

    def forward(self, tokens):
        x, extra = self.embed(tokens), 0.0
        for block in self.blocks:
            x = block(x)
            extra = extra + getattr(block, "aux", 0.0)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()) + 0.1 * extra


BLOCKS = [
    InPlace, ThroughData, Replaced, Training, Recording, Counting, Attribute, Numbers, Containers, InTheRouter,
    Auxiliary, Dense, Late,
]  # fmt: skip
SPLIT = {"*.w1.weight": {"tp": Shard(0)}, "*.w2.weight": {"tp": Shard(1)}}
PLANS = {
    "ep2, batch over ep": Plan({"ep": 2}, {"*": {}}, data_axis="ep", expert_axis="ep"),
    "ep2, no data axis": Plan({"ep": 2}, {"*": {}}, data_axis=None, expert_axis="ep"),
    "dp2 ep2, batch over both": Plan({"dp": 2, "ep": 2}, {"*": {}}, data_axis=("dp", "ep"), expert_axis="ep", zero=3),
    "dp2 ep2, batch over dp": Plan({"dp": 2, "ep": 2}, {"*": {}}, data_axis="dp", expert_axis="ep"),
    "ep2, replaced": Plan({"ep": 2}, {"*.experts.*": {"ep": Replicate()}, "*": {}}, data_axis="ep", expert_axis="ep"),
}


def build(block):
    torch.manual_seed(1)
    return Model(block).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def whole(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return torch.as_tensor(value).detach().double().clone()


def trained(model, optimizer, evaluates_first):
    """Steps of two calls each, with calls in evaluation between them; what was seen, by name."""
    torch.manual_seed(2)
    seen, calls = {}, 0
    for step in range(3):
        for train in (False, True, True) if evaluates_first else (True, True, False):
            batch = torch.randint(VOCABULARY, (BATCH, POSITIONS))
            model.train(train)
            with torch.set_grad_enabled(train):
                loss = model(batch)
            if train:
                loss.backward()
            calls += 1
            seen[f"loss of call {calls}"] = whole(loss)
            for i, block in enumerate(model.blocks):
                seen |= {f"{name} of block {i} after call {calls}": whole(one) for name, one in block.kept().items()}
        optimizer.step()
        optimizer.zero_grad()
        seen |= {f"{name} after step {step}": whole(one) for name, one in model.named_parameters()}
    return seen


def compared(plan):
    """What differs from one device; every other block is called in evaluation first."""
    found = []
    for evaluates_first, block in enumerate(BLOCKS):
        alone, model = build(block), build(block)
        expected = trained(alone, sgd(alone.parameters()), evaluates_first % 2)
        got = trained(*vescale.parallelize(plan, model, sgd), evaluates_first % 2)
        assert got.keys() == expected.keys()
        wrong = [name for name in got if not torch.allclose(got[name], expected[name], rtol=1e-9, atol=1e-9)]
        found += [f"{block.__name__}: {name}" for name in wrong[:3]]
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_state_is_that_of_one_device(plan):
    ranks = 4 if "dp2" in plan else 2
    assert run_ranks(ranks, compared, PLANS[plan]) == [[]] * ranks


def split_inside():
    plan = Plan({"ep": 2, "tp": 2}, {**SPLIT, "*": {}}, data_axis="ep", expert_axis="ep")
    alone = build(InPlace)
    expected = trained(alone, sgd(alone.parameters()), False)
    model, optimizer = vescale.parallelize(plan, build(InPlace), sgd)
    got = trained(model, optimizer, False)
    held = sum(one.to_local().numel() for one in model.blocks[0].experts.parameters())
    load = [sum(expert_load(model)[f"blocks.{i}.experts"]) for i in range(len(model.blocks))]
    return [name for name in got if not torch.allclose(got[name], expected[name], rtol=1e-9, atol=1e-9)], held, load


def test_experts_stay_spread_and_split_and_are_counted():
    each = sum(one.numel() for one in Expert().parameters())
    found = run_ranks(4, split_inside)
    assert [(wrong, load) for wrong, _, load in found] == [([], [BATCH * POSITIONS * CHOSEN])] * 4
    assert {held for _, held, _ in found} == {each}


class Remembering(Expert):
    last = None

    def forward(self, rows):
        self.last = rows
        return super().forward(rows)


class Rememberings(Block):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Remembering() for _ in range(EXPERTS))


def refused(block):
    model, _ = vescale.parallelize(PLANS["ep2, batch over ep"], build(block), sgd)
    model(torch.arange(BATCH * POSITIONS).view(BATCH, POSITIONS) % VOCABULARY).backward()


def test_what_cannot_be_right_says_why():
    match = "expert 0 of this list writes 'last' with a gradient, which would not come back"
    raises_on_all(2, PlanError, refused, Rememberings, match=match)


def warned():
    model, _ = vescale.parallelize(PLANS["ep2, batch over ep"], build(InPlace), sgd)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.zeros(BATCH, POSITIONS, dtype=torch.int64))
    return [str(one.message) for one in found if "the block of" in str(one.message)]


def test_the_first_rank_says_once_that_a_block_computes_on_the_whole_batch():
    first, second = run_ranks(2, warned)
    assert second == []
    assert len(first) == 1 and "InPlace computes on the whole batch" in first[0]
