"""How blocks call the experts of their list, and what these may give, against one device: five experts on two ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_plans import Plan, PlanError, expert_load
from vescale_testkit import raises_on_all, run_ranks

WIDTH, EXPERTS, CHOSEN, ROWS = 8, 5, 2, 12

pytestmark = pytest.mark.filterwarnings("ignore:where has no rule", "ignore:vescale_plans. the block of")


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, rows):
        return self.b(self.a(rows).relu())


class Counting(Expert):
    """Counts in an attribute and in an object of its own, and averages in a buffer."""

    def __init__(self):
        super().__init__()
        self.total, self.tally = torch.zeros((), dtype=torch.float64), SimpleNamespace(calls=0)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, rows):
        self.total += len(rows)
        self.tally.calls += 1
        self.mean.mul_(0.5).add_(rows.detach().mean(0))
        return super().forward(rows) + 0.1 * self.mean


class Detached(Expert):
    """Gives no gradient to its rows, and gets none."""

    def forward(self, rows):
        return super().forward(rows).detach()


class Itself(Expert):
    def forward(self, rows):
        return rows


class Double(Expert):
    def forward(self, rows):
        return super().forward(rows).double()


class Block(nn.Module):
    """Chosen experts alone."""

    def __init__(self, expert):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x):
        return x + self.mixed(x, self.router(x).softmax(-1))

    def mixed(self, x, shares):
        share, chosen = shares.topk(CHOSEN, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            if token.numel():
                out.index_add_(0, token, (expert(x[token]) * share[token, slot, None]).to(out.dtype))
        return out


class Summed(Block):
    """Behind the last expert nothing is kept for the backward."""

    def mixed(self, x, shares):
        return 0.1 * sum(expert(x) for expert in self.experts) + shares.square().sum()


class Chained(Block):
    def mixed(self, x, shares):
        for expert in self.experts:
            x = x + 0.1 * expert(x)
        return x + shares.square().sum()


class Writing(Block):
    """Writes to what experts give, and attributes of theirs."""

    def mixed(self, x, shares):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            expert.calls = getattr(expert, "calls", 0) + 1
            got = expert(x)
            got *= shares[:, i, None]
            out = out + got
        return out


class Model(nn.Module):
    def __init__(self, block, expert, frozen):
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.blocks = nn.ModuleList(block(expert) for _ in range(2))
        for parameter in self.blocks[0].experts.parameters():
            parameter.requires_grad_(not frozen)

    def forward(self, x):
        for before, block in zip(self.before, self.blocks):
            x = block(before(x))
        return x


def plan_of(ranks=2, data=True, **more):
    return Plan({"ep": ranks}, {"*": {}}, data_axis="ep" if data else None, expert_axis="ep", **more)


def build(block, expert, frozen=False, dtype=torch.float64):
    torch.manual_seed(0)
    return Model(block, expert, frozen).to(dtype)


def trained(model, optimizer, dtype, autocast):
    """Two steps of two batches each, and evaluations between, by name."""
    seen = {}
    for step in range(2):
        for part in range(2):
            x = torch.randn(ROWS, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(2 * step + part))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(x).double().square().mean()
            loss.backward()
            seen[f"loss {step} {part}"] = loss
        grads = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
        seen |= {f"gradient {step} {key}": one.clone() for key, one in grads.items()}
        optimizer.step()
        optimizer.zero_grad()
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                seen[f"{guard.__name__} {step}"] = model(torch.ones(7, WIDTH, dtype=dtype)).clone()
    experts = [one for block in model.blocks for one in block.experts]
    seen["calls"] = [getattr(one, "calls", 0) for one in experts]
    seen |= {f"buffer {key}": one.clone() for key, one in model.named_buffers()}
    seen |= {f"counts of {i}": torch.stack([one.total, torch.tensor(one.tally.calls)])
             for i, one in enumerate(experts) if isinstance(one, Counting)}  # fmt: skip
    return {key: one.full_tensor().detach() if hasattr(one, "full_tensor") else one for key, one in seen.items()}


def compared(cases, mode="eager"):
    """What differs from one device."""
    wrong = []
    for name, (plan, autocast, *kinds) in cases.items():
        dtype = torch.float32 if autocast else torch.float64
        alone, model = build(*kinds, dtype=dtype), build(*kinds, dtype=dtype)
        expected = trained(alone, torch.optim.SGD(alone.parameters(), lr=0.05), dtype, autocast)
        model, optimizer = vescale.parallelize(plan, model, lambda each: torch.optim.SGD(each, lr=0.05), mode=mode)
        got = trained(model, optimizer, dtype, autocast)
        assert got.keys() == expected.keys(), name
        for key, one in expected.items():
            bound = 2e-2 if autocast and "_mode" not in key and "no_grad" not in key else 1e-3 if autocast else 1e-9
            try:
                torch.testing.assert_close(got[key], one, rtol=bound, atol=bound)
            except AssertionError as error:
                wrong.append(f"{name}, {key}: {error}")
        if kinds[0] is Block and not autocast:
            assert [sum(rows) for rows in expert_load(model).values()] == [7 * CHOSEN] * 2
    return wrong


CALLS = {
    "summed": (plan_of(), False, Summed, Expert),
    "chained": (plan_of(), False, Chained, Expert),
    "written to": (plan_of(), False, Writing, Expert),
    "no gradient": (plan_of(), False, Summed, Detached),
    "no gradient, frozen": (plan_of(), False, Summed, Detached, True),
    "frozen": (plan_of(data=False), False, Block, Expert, True),
    "its rows": (plan_of(data=False), False, Summed, Itself),
    "bfloat16 in training alone": (plan_of(), True, Block, Expert),
    "another dtype": (plan_of(), True, Block, Double),
    "layers recomputed": (plan_of(checkpointing={"blocks.*": True}), False, Block, Expert),
    "summed, recomputed": (plan_of(checkpointing={"blocks.*": True}), False, Summed, Expert),
    "state, recomputed": (plan_of(data=False, checkpointing={"blocks.*": True}), False, Summed, Counting),
    "chained, recomputed": (plan_of(data=False, checkpointing={"blocks.*": True}), False, Chained, Expert),
}


def test_calls_are_those_of_one_device():
    for wrong in run_ranks(2, compared, CALLS):
        assert wrong == []


@pytest.mark.filterwarnings("ignore:Block runs eagerly")
def test_compile_mode_leaves_a_number_of_rows_to_python():
    """Whether an expert has rows is asked of values: no graph can know, and the call is eager."""
    assert run_ranks(2, compared, {"chosen": (plan_of(), False, Block, Expert)}, "compile") == [[], []]


def test_one_rank_holds_all():
    plan = plan_of(1)
    assert run_ranks(1, compared, {"written to": (plan, False, Writing, Expert)}) == [[]]


class Third(Expert):
    made = 0

    def __init__(self):
        super().__init__()
        self.place, Third.made = Third.made % EXPERTS, Third.made + 1


class Raising(Third):
    def forward(self, rows):
        if self.place == 3:
            raise ValueError("no such row")
        return super().forward(rows)


class Mixed(Third):
    def forward(self, rows):
        made = super().forward(rows)
        return made.float() if self.place == 3 else made


class Pair(Expert):
    def forward(self, rows):
        return super().forward(rows), None


class InPlace(Expert):
    def forward(self, rows):
        return super().forward(rows.mul_(2))


class Dropping(Expert):
    def forward(self, rows):
        return F.dropout(super().forward(rows))


class InParts(Block):
    def __init__(self, expert):
        super().__init__(expert)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(EXPERTS))

    def mixed(self, x, shares):
        return sum(layer(x) for expert in self.experts for layer in expert)


REFUSED = {
    Raising: "expert 3 of this list raises ValueError: no such row",
    Mixed: "expert 3 of this list gives torch.float32, where others gave torch.float64",
    Pair: r"expert 0 of this list makes tuple of rows \[12, 8\]",
    InPlace: "expert 0 of this list writes to the rows that it is given",
    Dropping: "expert 0 of this list draws random numbers",
    InParts: "expert 0 of 'blocks.0.experts' is asked for its part 0",
    "recomputed": r"checkpointing names 'blocks.0.experts.0', one expert of a list",
}


def refused(kind):
    plan = plan_of(data=False, checkpointing={"*.experts.*": kind == "recomputed"})
    block, expert = (InParts, Expert) if kind is InParts else (Summed, Expert if kind == "recomputed" else kind)
    Third.made = 0
    model, _ = vescale.parallelize(plan, build(block, expert), None)
    model(torch.ones(ROWS, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_right_says_why(kind):
    raises_on_all(2, PlanError, refused, kind, match=REFUSED[kind])
