"""Optimizer states on the host: tried where nothing else fits, held and priced as the engine has it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from vescale_plans import InfeasibleError, Precision, dry_run, generate_plan
from vescale_plans.search import (
    Candidate,
    Request,
    hardware_of,
    memory_of,
    plan_of,
    rank,
    sample_of,
    sizes_of,
    structure_of,
)
from vescale_plans.search.pricer import Pricer

WIDTH, ROWS, POSITIONS = 1024, 8, 16
"""Blocks of more than a bucket of gradients."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(32))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


H100 = hardware_of("h100")


@pytest.fixture(scope="module")
def net():
    with torch.device("meta"):
        model = Net()
    return model, structure_of(model, sample_of(model, torch.arange(POSITIONS)[None]))


def ask(found, world, limit, **more):
    return Request(found, world, ROWS, POSITIONS, H100, limit, dtype=torch.bfloat16, **more)


@pytest.mark.parametrize("world", [1, 2])
def test_it_is_chosen_where_nothing_else_fits_and_nowhere_else(net, world):
    """With a byte less than the least that fits without it."""
    _, found = net
    pin = {"pp": 1, "cp": 1}
    least = rank(ask(found, world, 1e12, objective="memory", pin=pin))[0].memory.total
    assert not any(one.candidate.offload for one in rank(ask(found, world, least, pin=pin)))
    short = ask(found, world, least - 1, pin=pin)
    best = rank(short)
    assert all(one.candidate.offload for one in best)
    assert all(one.memory.total < least for one in best)
    assert plan_of(found, best[0]).offload
    for said in ({"pin": {**pin, "offload": False}}, {"forbid": ("offload",)}):
        with pytest.raises(InfeasibleError, match="memory binds"):
            rank(replace(short, **said))
    with pytest.raises(InfeasibleError, match=r"least  .*offload"):  # of all that there is
        rank(replace(short, limit=1.0))
    with pytest.raises(InfeasibleError) as refused:  # a host has no host
        rank(replace(short, limit=1.0, hardware=hardware_of("cpu")))
    assert "offload" not in str(refused.value)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("candidate", [Candidate(), Candidate(dp=2), Candidate(dp=2, zero=2), Candidate(dp=2, zero=3),
                                       Candidate(tp=2)])  # fmt: skip
def test_memory_is_that_of_a_dry_run(net, candidate, narrow):
    """On a device beside a host: of parameters and states exactly, in all within a tenth, as without it."""
    model, found = net
    hardware = H100 if narrow else H100.computing(4)
    precision = Precision(torch.bfloat16) if narrow else None
    for offload in (False, True):
        one = replace(candidate, offload=offload)
        closed = memory_of(sizes_of(found, one.tp), one, hardware, ROWS, POSITIONS)
        plan = plan_of(found, one).override(precision=precision)
        ids = torch.zeros(ROWS, POSITIONS, dtype=torch.int64)
        dry = dry_run(plan, model, ids, torch.optim.AdamW, loss_fn=lambda out, ids: out.float().square().mean())
        resting = sum(size for kind, size in dry.resting.items() if kind in ("parameters", "optimizer", "other"))
        assert closed.parameters + closed.states == pytest.approx(resting, rel=0.02, abs=64)
        assert closed.total == pytest.approx(dry.peak, rel=0.1)


def test_it_takes_as_long_as_the_link_and_the_host_s_memory(net):
    _, found = net
    pricer, numbers = Pricer(ask(found, 2, 1e12)), found.parameters
    for offload, each in ((False, 32 / 3.35e12), (True, 32 / 60e9 + 8 / 50e9)):
        cost = pricer.evenly(Candidate(dp=2, zero=2, offload=offload)).cost
        assert cost.optimizer == pytest.approx(each * numbers / 2, rel=1e-6)


def test_a_page_says_so(net):
    model, found = net
    least = rank(ask(found, 1, 1e12, objective="memory"))[0].memory.total
    plan = generate_plan(
        model, world_size=1, batch=ROWS, hardware="h100", memory=least - 1, precision=Precision(torch.bfloat16),
        sample=torch.arange(POSITIONS)[None],
    )  # fmt: skip
    assert plan.offload
    text = str(plan.explain())
    assert "offload: the optimizer's states in host memory, 50 GB/s to it" in text
    assert "offload" in str(plan.explain(against={"offload": False}))
