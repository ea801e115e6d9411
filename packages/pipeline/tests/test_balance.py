"""Cuts by cost: the best that there are, and costs that leave nothing out."""

import itertools
import random
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_pipeline import PipelineError, balanced_cuts
from vescale_pipeline.balance import best_cuts, candidates, module_costs

VOCABULARY, WIDTH = 512, 16


class Block(nn.Module):
    def __init__(self, seconds=0.0):
        super().__init__()
        self.seconds = seconds
        self.inner = nn.ModuleList([nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)])

    def forward(self, x):
        time.sleep(self.seconds)
        return x + self.inner[1](F.relu(self.inner[0](x)))


class Model(nn.Module):
    """The head is the dearest module. `odd`: a module runs second that is registered last."""

    def __init__(self, seconds=(0.0,) * 6, odd=False):
        super().__init__()
        self.body = nn.Module()
        self.body.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body.layers = nn.ModuleList(map(Block, seconds))
        self.body.norm = nn.BatchNorm1d(WIDTH)
        self.body.rotary = nn.Identity()  # no parameters: it begins no stage
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.positions = nn.Embedding(32, WIDTH) if odd else None

    def forward(self, ids, labels):
        x = self.body.rotary(self.body.embed(ids))
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]))
        for layer in self.body.layers:
            x = F.dropout(layer(x), 0.1)
        x = self.body.norm(x.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch():
    return torch.randint(VOCABULARY, (2, 4, 16)).unbind()


def largest(costs, begins):
    stages = [sum(costs[a:b]) for a, b in itertools.pairwise([0, *begins, len(costs)])]
    return max(stages), sum(stage**2 for stage in stages)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_cuts(seed):
    numbers = random.Random(seed)
    costs = [numbers.choice([0.0, 1.0, 2.0, 5.0, 9.5]) for _ in range(numbers.randint(3, 9))]
    for stages in range(1, len(costs) + 1):
        tries = [largest(costs, each) for each in itertools.combinations(range(1, len(costs)), stages - 1)]
        assert largest(costs, best_cuts(costs, stages)) == pytest.approx(min(tries))


NAMES = ["body.embed", *(f"body.layers.{i}" for i in range(6)), "body.norm", "head"]


def test_candidates_are_blocks_and_what_stands_beside_them():
    assert list(candidates(Model()).values()) == NAMES
    assert list(candidates(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), Block())).values()) == ["0", "2"]


@pytest.mark.parametrize("measured", [False, True])
def test_costs_leave_no_trace(measured):
    model, given = Model(), batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert list(module_costs(model, given, measured=measured)) == NAMES
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_dear_head_takes_blocks_away_from_the_last_stage():
    model, given = Model(), batch()
    costs = module_costs(model, given)
    assert costs == module_costs(model, {"ids": given[0], "labels": given[1]})
    blocks = [costs[name] for name in NAMES if "layers" in name]
    assert max(blocks) < 1.1 * min(blocks) and costs["head"] > 3 * blocks[0] and costs["body.embed"] > 0
    of_each = list(costs.values())
    begin = NAMES.index(balanced_cuts(model, 2, given)[0])
    assert largest(of_each, [begin])[0] < 0.8 * largest(of_each, [NAMES.index("body.layers.3")])[0]


def test_what_runs_out_of_its_place_counts_for_the_one_before():
    plain, odd = (module_costs(Model(odd=odd), batch()) for odd in (False, True))
    assert list(odd) == ["body.embed", "positions"]  # registered last: after it, nothing is in its place
    assert sum(odd.values()) > sum(plain.values())


class Grouped(nn.Module):
    """Four heads of queries, and so many of keys and values."""

    def __init__(self, heads):
        super().__init__()
        self.heads, self.into, self.out = heads, nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        query = self.into(x).unflatten(-1, (4, -1)).transpose(1, 2)
        rest = query[:, : self.heads]
        out = F.scaled_dot_product_attention(query, rest, rest, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


def test_attention_with_grouped_heads_computes_as_much():
    product = 2 * (2 * 16) * 32 * 32  # of a Linear; the two of attention are half of it each
    for heads in (2, 4):
        model = nn.Sequential(Grouped(heads), nn.Linear(32, 32))
        costs = module_costs(model, torch.randn(2, 16, 32), flops_per_byte=1e-9)
        last = 3 * product  # one in forward, and of the gradients of input and weight
        attention = 7 * product / 2  # two products in forward, five in backward, which computes the scores again
        assert costs["1"] * 1e-9 == pytest.approx(last, rel=1e-6)
        assert costs["0"] * 1e-9 == pytest.approx(2 * product + attention + 3 * product, rel=1e-6)


def test_measured_costs_follow_the_clock():
    costs = module_costs(Model([0.0, 0.3, 0.0, 0.0, 0.2, 0.0]), batch(), measured=True)
    dearest = sorted(costs, key=costs.get)[-2:]
    assert dearest == ["body.layers.4", "body.layers.1"]
    assert costs["body.layers.1"] >= 0.3


def test_too_few_modules():
    with pytest.raises(PipelineError, match="3 stages of 2 modules"):
        balanced_cuts(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 3, torch.randn(2, 2))
