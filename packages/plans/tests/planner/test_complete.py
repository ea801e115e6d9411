"""Plan.complete: a plan of parameters alone gets the boundaries that spare its traffic, and keeps what it says."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vescale_dtensor import InterleavedShard, Replicate, Shard
from vescale_plans import Boundary, Plan, PlanError, dry_run, parallelize
from vescale_testkit import run_ranks

COLUMN, ROW = {"tp": Shard(0)}, {"tp": Shard(1)}
NAMED = {"*.one.weight": COLUMN, "*.gate.weight": COLUMN, "*.two.weight": ROW, "table.weight": COLUMN, "*": {}}


class Norm(nn.Module):
    """Written out, so that it reads its input twice."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Part(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = Norm(width)
        self.one, self.gate = nn.Linear(width, 32, bias=False), nn.Linear(width, 32, bias=False)
        self.two = nn.Linear(32, width, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.two(F.silu(self.gate(x)) * self.one(x))


class Model(nn.Module):
    """A residual stream that several read, under names that say nothing."""

    def __init__(self, parts=3):
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.parts = nn.ModuleList(Part() for _ in range(parts))
        self.last = Norm(16)

    def forward(self, ids):
        x = self.table(ids)
        for part in self.parts:
            x = x + part(x)
        return self.last(x).square().mean()


IDS = torch.arange(24).reshape(2, 12)


def sent(plan, kind=Model):
    """Collectives beside gradient syncs, and the bytes of them."""
    events = [e for e in dry_run(plan, kind(), IDS).collectives if e.cause.function != "gradient sync"]
    return sum(event.count for event in events), sum(event.received for event in events)


def test_parameters_alone_send_no_more_than_with_boundaries_written():
    bare = Plan(mesh={"tp": 2}, parameters=NAMED)
    whole = Boundary(output={"tp": Replicate()})
    written = bare.override(boundaries={"*.two": whole, "table": whole})
    completed = bare.complete(Model(), IDS)
    assert sent(completed) == sent(written)
    assert sent(completed)[0] == 1 + 3 + 3  # the table's, and of each part one in each direction
    assert sent(bare)[0] > 2 * sent(completed)[0]


def test_the_difference_names_each_boundary_once():
    bare = Plan(mesh={"tp": 2}, parameters=NAMED)
    said = str(bare.diff(bare.complete(Model(), IDS)))
    assert len(said.splitlines()) == 2 and "'parts.*.two'" in said and "'table'" in said


def test_what_a_plan_says_stands():
    said = {
        "parts.1.two": Boundary(output={"tp": Shard(1)}),
        "*.two": Boundary(input={"tp": Shard(2)}),
        "table": Boundary(),
    }
    plan = Plan(mesh={"dp": 2, "tp": 2}, parameters=NAMED, boundaries=said, zero=3)
    completed = plan.complete(Model(), IDS)
    assert completed.zero == 3 and completed.parameters == plan.parameters
    assert completed.boundaries["parts.1.two"] == said["parts.1.two"]
    assert completed.boundaries["parts.0.two"] == Boundary({"tp": Shard(2)}, {"tp": Replicate()})
    completed.validate(Model())  # no glob of the plan was left without a module


def test_it_adds_nothing_twice_and_nothing_where_nothing_is_cut():
    plan = Plan(mesh={"tp": 2}, parameters=NAMED)
    once = plan.complete(Model(), IDS)
    assert once.complete(Model(), IDS) == once
    data = Plan(mesh={"dp": 2}, parameters={"*": {}})
    assert data.complete(Model(), IDS) is data


def test_two_axes_that_cut_weights_get_one_boundary_for_both():
    both = {"*.one.weight": {"a": Shard(0), "b": Shard(0)}, "*.gate.weight": {"a": Shard(0), "b": Shard(0)}}
    plan = Plan(mesh={"a": 2, "b": 2}, parameters=both | {"*.two.weight": {"a": Shard(1), "b": Shard(1)}, "*": {}})
    completed = plan.complete(Model(), IDS)
    assert completed.boundaries == {"parts.*.two": Boundary(output={"a": Replicate(), "b": Replicate()})}


def test_a_model_of_which_nobody_says_what_it_takes_is_an_error_with_the_remedy():
    with pytest.raises(PlanError, match="sample="):
        Plan(mesh={"tp": 2}, parameters=NAMED).complete(Model())


class Prompted(Model):
    """Positions of its own before the sample's, as long as blocks run."""

    def __init__(self):
        super().__init__()
        self.inner, self.prompt = Inner(self.parts), nn.Parameter(torch.ones(1, 5, 16))

    def forward(self, ids):
        x = self.inner(torch.cat([self.prompt.expand(ids.shape[0], -1, -1), self.table(ids)], 1))
        return self.last(x).square().mean()


class Inner(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.layers = parts

    def forward(self, x):
        for part in self.layers:
            x = x + part(x)
        return x[:, 5:]


def test_positions_that_a_model_adds_do_not_move_boundaries_out_of_its_blocks():
    model = Prompted()
    del model.parts
    completed = Plan(mesh={"tp": 2}, parameters=NAMED).complete(model, IDS)
    assert completed.boundaries["inner.layers.*.two"] == Boundary(output={"tp": Replicate()})
    assert "inner" not in completed.boundaries


class Merged(Part):
    """Gate and up in one weight: a rank's part of its rows is not what its part of the next weight reads."""

    def __init__(self, width=16):
        super().__init__(width)
        del self.gate
        self.one = nn.Linear(width, 64)

    def forward(self, x):
        gate, up = self.one(self.norm(x)).chunk(2, -1)
        return self.two(F.silu(gate) * up)


class Stacked(Model):
    """Blocks whose first weights are merged."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Merged() for _ in range(3))


def of_merged(cut):
    named = {"*.one.*": {"tp": cut}, "*.two.weight": ROW, "table.weight": COLUMN, "*": {}}
    return Plan(mesh={"tp": 2}, parameters=named)


def of_step(model, collect):
    """Gradients of a step, by names, and the loss."""
    loss = model(IDS)
    loss.backward()
    return {"loss": collect(loss.detach())} | {n: collect(p.grad) for n, p in model.named_parameters()}


def merged_step():
    plan = of_merged(Shard(0)).complete(Stacked(), IDS)
    torch.manual_seed(0)
    model, _ = parallelize(plan, Stacked())
    return of_step(model, lambda one: getattr(one, "full_tensor", lambda: one)())


def test_what_merged_weights_give_in_other_rows_than_their_readers_is_gathered_once():
    """Each function that meets it would convert it for itself, and the next weight with it."""
    whole, bare = Boundary(output={"tp": Replicate()}), of_merged(Shard(0))
    completed = bare.complete(Stacked(), IDS)
    assert completed.boundaries == {"table": whole, "parts.*.one": whole, "parts.*.two": whole}
    assert sent(completed, Stacked)[0] == 1 + 3 * (1 + 1 + 2)
    torch.manual_seed(0)
    wanted = of_step(Stacked(), lambda one: one)
    for found in run_ranks(2, merged_step):
        torch.testing.assert_close(found, wanted)


def test_merged_weights_in_the_rows_of_their_readers_are_left_as_they_are():
    completed = of_merged(InterleavedShard(0, 2)).complete(Stacked(), IDS)
    whole = Boundary(output={"tp": Replicate()})
    assert completed.boundaries == {"table": whole, "parts.*.two": whole}
    assert sent(completed, Stacked)[0] == 1 + 3 + 3
