"""Odd and infeasible requests: each gets a valid plan, or an error whose every remedy is a request that gets one."""

import re

import pytest
import torch
from torch import nn

from vescale_plans import Plan, PlanError
from vescale_plans.search import Experts, InfeasibleError, Request, generate_plan, rank, sample_of, structure_of
from vescale_plans.search.pricing.profiles import hardware_of
from vescale_testkit import in_turns

GIB = 2**30
IDS = torch.arange(6)[None]


class Decoder(nn.Module):
    """Heads of queries in groups that share keys and values, a wide layer; the head may be the table."""

    def __init__(self, layers=4, width=64, heads=8, shared=8, inner=256, words=101, tied=False, seen=False):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, shared, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.mix = nn.BatchNorm1d(width) if seen else None
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        if self.mix is not None:
            x = x - x.mean((0, 1))
        return self.head(self.norm(x))


class DecoderBlock(nn.Module):
    def __init__(self, width, heads, shared, inner):
        super().__init__()
        self.size, self.times = width // heads, heads // shared
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, self.size * n, bias=False) for n in (heads, shared, shared))
        self.o, self.up, self.down = nn.Linear(width, width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        y = self.before(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(self.times, 1) for one in (k, v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.between(x))))


PLAIN = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def seventy():
    """80 blocks of Llama-70B's sizes."""
    with torch.device("meta"):
        return Decoder(80, 8192, 64, 8, 28672, 32000)


MODELS = {
    "small": lambda: (Decoder(), IDS),
    "tied": lambda: (Decoder(tied=True), IDS),
    "meeting": lambda: (Decoder(seen=True), IDS),
    "plain": lambda: (PLAIN, torch.randn(4, 8)),
    "seventy": lambda: (seventy(), IDS),
}

VALID = {
    "a prime world": ("small", {"world_size": 13, "batch": 26}),
    "one rank": ("small", {"world_size": 1, "batch": 3}),
    "one row": ("small", {"world_size": 8, "batch": 1}),
    "rows that do not divide": ("small", {"world_size": 4, "batch": 7, "pin": {"dp": 4}}),
    "no repeated blocks": ("plain", {"world_size": 4, "batch": 4}),
    "tied weights over stages": ("tied", {"world_size": 4, "batch": 4, "pin": {"pp": 4}}),
    "tied weights split and cut": ("tied", {"world_size": 4, "batch": 4, "pin": {"pp": 2, "tp": 2}}),
    "rows that meet": ("meeting", {"world_size": 4, "batch": 8}),
    "more ranks than heads of keys": ("small", {"world_size": 16, "batch": 1, "pin": {"pp": 4}}),
    "a batch too large for one backward": ("seventy", {"world_size": 64, "batch": 1 << 14, "seq": 4096,
                                                       "pin": {"checkpointing": False, "pp": 1}}),
    "ZeRO-3 in a pipeline": ("small", {"world_size": 8, "batch": 8, "pin": {"pp": 2, "zero": 3}}),
}  # fmt: skip

INFEASIBLE = {
    "70B on 8 x 24 GB": ("seventy", {"world_size": 8, "batch": 8, "seq": 4096, "memory": 24 * GIB}, "memory binds"),
    "tp 6 with 8 heads of keys": ("small", {"world_size": 6, "batch": 12, "pin": {"tp": 6}}, "pin={'tp': 6}"),
    "more stages than blocks": ("small", {"world_size": 8, "batch": 16, "pin": {"pp": 8}}, "pin={'pp': 8}"),
    "ZeRO of one replica": ("small", {"world_size": 8, "batch": 8, "pin": {"dp": 1, "zero": 3}}, "leave no plan"),
    "experts of a dense model": ("small", {"world_size": 4, "batch": 4, "pin": {"ep": 2}}, "pin={'ep': 2}"),
    "everything forbidden": ("small", {"world_size": 4, "batch": 4, "forbid": ["dp", "tp", "pp"]}, "leave no plan"),
    "ranks for nobody": ("plain", {"world_size": 13, "batch": 4}, "13 ranks cannot all be used with a batch of 4"),
    "rows that meet, split": ("meeting", {"world_size": 4, "batch": 8, "pin": {"dp": 4}}, "none: rows of the batch"),
    "a batch too large": ("seventy", {"world_size": 64, "batch": 1 << 14, "seq": 4096,
                                       "pin": {"checkpointing": False, "microbatches": 1}}, "memory binds"),
    "degrees that are not the world": ("small", {"world_size": 8, "batch": 8, "pin": {"tp": 2, "dp": 2, "pp": 1}},
                                       "leave no plan for 8 ranks"),
    "no memory at all": ("small", {"world_size": 2, "batch": 2, "memory": 0}, "within 0 GiB"),
}  # fmt: skip


def asked(name, request):
    model, sample = MODELS[name]()
    return model, generate_plan(model, {"hardware": "h100", "sample": sample, **request})


@in_turns(3)
@pytest.mark.parametrize("case", VALID)
def test_an_odd_request_gets_a_plan(case):
    name, request = VALID[case]
    model, plan = asked(name, request)
    assert plan.world_size == request["world_size"]
    plan.validate(model)
    for name_of_pin, value in request.get("pin", {}).items():
        found = {"zero": plan.zero, "checkpointing": bool(plan.checkpointing), **dict.fromkeys(("pp", "dp", "tp"), 1)}
        assert {**found, **plan.mesh}[name_of_pin] == value
    if "backward" in case:
        assert plan.accumulation > 1
    if name == "tied":
        placed = [
            next(p for glob, p in plan.parameters.items() if glob in (one, "*"))
            for one in ("table.weight", "head.weight")
        ]
        assert placed[0] == placed[1]


@in_turns(3)
@pytest.mark.parametrize("case", INFEASIBLE)
def test_an_infeasible_request_names_what_binds_and_what_would_do(case):
    name, request, said = INFEASIBLE[case]
    with pytest.raises(InfeasibleError, match=re.escape(said)) as raised:
        asked(name, request)
    assert raised.value.remedies
    for code, _ in raised.value.remedies:
        changed = eval(f"dict({code})")  # a remedy is keyword arguments
        _, plan = asked(name, {**request, **changed})
        assert plan.world_size == {**request, **changed}["world_size"], code


def test_a_stack_of_six_experts_goes_over_two_or_three_ranks():
    structure = structure_of(Decoder(), sample_of(Decoder(), IDS))
    stack = Experts(("blocks.0.up.weight",), 6, "blocks.0", 2, spreads=True)
    object.__setattr__(structure, "experts", (stack,))
    request = Request(structure, 8, 8, 64, hardware_of("h100"), 1e12, pin={"ep": 4})
    with pytest.raises(InfeasibleError, match=r"experts spread over  \[2, 3, 6\]") as raised:
        rank(request)
    assert raised.value.remedies[0][0] == "pin={'ep': 2}"


def test_overrides_that_match_nothing_are_an_error():
    with pytest.raises(PlanError, match=r"hed\.weight"):
        asked("small", {"world_size": 2, "batch": 2, "overrides": {"hed.weight": {}}})


def test_one_mapping_carries_all():
    request = {"world_size": 4, "batch": 8, "seq": 32, "memory": GIB, "objective": "memory", "pin": {"tp": 2}}
    request |= {"forbid": ["sp"], "overrides": {"head.weight": {}}, "hardware": "h100", "sample": IDS}
    plan = generate_plan(Decoder(), request)
    assert plan == generate_plan(Decoder(), **request)
    assert isinstance(plan, Plan)
    assert plan.mesh["tp"] == 2


class Backwards(nn.Module):
    """Blocks that are called from the last to the first."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x):
        for step in reversed(self.steps):
            x = step(x)
        return x.square().mean()


class Unasked(Backwards):
    """Blocks whose `forward` is called, not they."""

    def forward(self, x):
        for step in self.steps:
            x = step.forward(x)
        return x.square().mean()


class Unlisted(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.two(self.one(x).relu()).square().mean()


@pytest.mark.parametrize(
    "kind, width, said",
    [
        (Backwards, 8, "no cut between  steps.*: they are not called in the order of their registration"),
        (Unasked, 8, "no cut between  steps.*: the forward calls fewer than two of them, or not with tensors"),
        (Unlisted, 8, "no cut between  anything: no list of blocks was found"),
    ],
)
def test_a_pipeline_that_cannot_be_planned_says_what_is_in_its_way(kind, width, said):
    with pytest.raises(InfeasibleError) as raised:
        generate_plan(
            kind(), world_size=2, batch=4, hardware="h100", sample=torch.ones(1, width),
            pin={"pp": 2, "dp": 1, "tp": 1},
        )  # fmt: skip
    assert said in str(raised.value) and "by hand  Plan(pipeline=Pipeline(cuts=" in str(raised.value)
