"""Ranks that leave the step of the others: one draws a number alone, or replicas part. Every rank hears of it soon."""

import random
import re
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import PlainTensorError, Replicate, Shard
from vescale_plans import Boundary, Plan, parallelize
from vescale_rng import RandomStateError
from vescale_testkit import raises_on_all, run_ranks, warm_up

warm_up("vescale_plans")

CUT = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "*": {}}
TP = Plan({"tp": 2}, CUT, boundaries={"2": Boundary(output={"tp": Replicate()})})
BOTH = Plan({"dp": 2, "tp": 2}, CUT, zero=1, boundaries={"2": Boundary(output={"tp": Replicate()})})
ALIKE = Plan({"tp": 2}, {"*": {}})


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def made(kind=nn.Sequential, rate=0.3):
    torch.manual_seed(0)
    return kind(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.Dropout(rate), nn.Linear(7, 3))


def trained(model, optimizer, steps, between=lambda step: None, batch=lambda step: step):
    """The losses; `between` runs before each step."""
    losses = []
    for step in range(steps):
        between(step)
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(batch(step)))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def call_of(message):
    return int(re.search(r"at call (\d+) of the model", message)[1])


@pytest.mark.parametrize("step", [2, 7])
def test_one_rank_draws_alone(step):
    def run():
        def between(at):
            if at == step and torch.distributed.get_rank() == 0:
                torch.rand(1)

        trained(*parallelize(TP, made(), sgd), 30, between)

    message = raises_on_all(2, RandomStateError, run, match="model: rank 0 drifted first")
    assert step < call_of(message) <= step + 11 and "test_in_step.py" in message and "bernoulli_" in message


@pytest.mark.parametrize("kind", [nn.Sequential, Recomputed])
def test_one_of_four_ranks_draws_within_the_forward(kind):
    class Logged(kind):
        def forward(self, x):
            if torch.distributed.get_rank() == 3:
                self.calls = getattr(self, "calls", 0) + 1
                if self.calls == 5:
                    torch.rand(1)
            return super().forward(x)

    def run():
        trained(*parallelize(BOTH, made(Logged), sgd), 30)

    message = raises_on_all(4, RandomStateError, run, match="rank 3 drifted first")
    assert ", out of step  3" in message and 5 < call_of(message) <= 16


@pytest.mark.parametrize("alone", [0, 1])
def test_the_line_where_one_rank_draws_alone(alone):
    """The draw is of a sharded tensor, through the library."""

    def run():
        model, optimizer = parallelize(TP, made(), sgd)
        line = []

        def between(step):
            if step == 5 and torch.distributed.get_rank() == alone:
                nn.functional.dropout(model[4].weight.detach(), 0.5)
                line.append(sys._getframe().f_lineno - 1)

        with pytest.raises(RandomStateError, match=f"rank {alone} drifted first") as error:
            trained(model, optimizer, 30, between)
        return line, str(error.value)

    results = run_ranks(2, run)
    (line,) = results[alone][0]
    assert all(f"test_in_step.py:{line}" in message.partition("out of step at")[2] for _, message in results)
    assert all(call_of(message) == 11 for _, message in results)


def test_batches_differ_after_the_first_calls():
    def run():
        rank = torch.distributed.get_rank()
        trained(*parallelize(ALIKE, made(rate=0.0), sgd), 30, batch=lambda step: step if step < 4 else 2 * step + rank)

    raises_on_all(2, PlainTensorError, run, match="plain input tensor 0 differs between ranks 0 and 1")


def test_batches_to_be_cut_differ_after_the_first():
    def run():
        rank = torch.distributed.get_rank()
        for step in range(11):
            noise = torch.Generator().manual_seed(step if step < 4 else 2 * step + rank)
            BOTH.shard_batch({"x": torch.randn(8, 5, generator=noise), "names": ["a"]})

    assert "Plan.shard_batch: plain input tensor 0 differs" in raises_on_all(4, PlainTensorError, run)


@pytest.mark.parametrize("plan", [TP, BOTH], ids=["tp", "dp-tp"])
def test_one_rank_writes_a_weight_after_the_first_calls(plan):
    def run():
        model, optimizer = parallelize(plan, made(rate=0.0), sgd)

        def between(step):
            if step == 5 and torch.distributed.get_rank() == 1:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.01)

        trained(model, optimizer, 45, between)

    assert "different values on rank 1" in raises_on_all(plan.mesh.get("dp", 1) * 2, PlainTensorError, run)


@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize("zero", [0, 3])
def test_one_rank_freezes_a_parameter(zero, step):
    """The others would step by their part of its gradient. What is frozen is no replica's under ZeRO-3."""

    def run():
        model, optimizer = parallelize(Plan({"dp": 2}, {"*": {}}, zero=zero), made(), torch.optim.AdamW)

        def between(at):
            if at == step and torch.distributed.get_rank() == 0:
                model[2].weight.requires_grad_(False)

        trained(model, optimizer, 30, between)

    message = raises_on_all(2, PlainTensorError, run, match="requires_grad of '2.weight' has different values on rank")
    assert step < call_of(message) <= step + 11


STATES = ("exp_avg", "exp_avg_sq")
FLIPS = {  # the plan, and of what all ranks along an axis hold the same for good
    "dp": (Plan({"dp": 4}, {"*": {}}), ("", *STATES)),
    "dp-tp": (Plan({"dp": 2, "tp": 2}, CUT, boundaries=TP.boundaries), ("", *STATES)),
    "zero-1": (Plan({"dp": 2, "tp": 2}, {"*": {}}, zero=1), STATES),
    "zero-3": (Plan({"dp": 2, "tp": 2}, {"*": {}}, zero=3), STATES),
}


def flipped(plan, kind, rank, step, bit, chosen):
    """Flips a bit on one rank in the middle of a training. Returns the tensor's name, there, and the error's text."""
    model, optimizer = parallelize(plan, made(), torch.optim.AdamW)
    flips = []

    def between(at):
        if at == step and torch.distributed.get_rank() == rank:
            of = {name: optimizer.state[one][kind] if kind else one.detach() for name, one in model.named_parameters()}
            held = {name: one.to_local().view(-1) for name, one in of.items() if Replicate() in one.placements}
            held = {name: one for name, one in held.items() if one.numel()}
            flips.append([*held][chosen % len(held)])
            held[flips[0]].view(torch.int32)[-1:] ^= 1 << bit

    with pytest.raises(PlainTensorError) as error:
        trained(model, optimizer, 25, between)
    return flips, str(error.value)


def flips(plan, cases):
    return [flipped(plan, *case) for case in cases]


@pytest.mark.parametrize("case", FLIPS)
def test_a_flipped_bit_is_named(case):
    plan, kinds = FLIPS[case]
    draw = random.Random(case)
    cases = []
    for kind in draw.choices(kinds, k=13):
        bit = draw.randrange(20 if kind else 0, 28)  # a state rounds its low bits away
        cases.append((kind, draw.randrange(4), draw.randrange(1, 15), bit, draw.randrange(100)))
    results = run_ranks(4, flips, plan, cases)
    for at, (kind, rank, step, *_) in enumerate(cases):
        (name,), text = results[rank][at]
        what = f"the state {kind!r} of {name!r}" if kind else f"the parameter {name!r}"
        assert f"model: {what} has different values on rank" in text
        found, last = map(int, re.search(r"at call (\d+) of the model, alike at call (\d+)", text).groups())
        assert last <= step < found <= last + 10
        odd, other = map(int, re.search(r"on rank (\d+) of .* than on rank (\d+)", text).groups())
        assert rank == odd if case == "dp" else rank in (odd, other)


@pytest.mark.parametrize("kind", [nn.Sequential, Recomputed])
@pytest.mark.parametrize("plan", [TP, BOTH], ids=["tp", "dp-tp"])
def test_what_ranks_may_draw_apart(plan, kind):
    """Generators of a rank's own, and one that evaluates alone what draws nothing."""

    def between(step):
        rank = torch.distributed.get_rank()
        torch.rand(rank, generator=torch.Generator().manual_seed(rank))
        [random.random() for _ in range(rank)]

    def run():
        model, optimizer = parallelize(plan, made(kind), sgd)
        losses = trained(model, optimizer, 25, between)
        return losses, model[4].weight.full_tensor().detach(), torch.get_rng_state()

    alone = made(kind)
    losses = trained(alone, sgd(alone.parameters()), 25)
    for found, weight, state in run_ranks(plan.mesh.get("dp", 1) * 2, run):
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(weight, alone[4].weight)
        assert torch.equal(state, torch.get_rng_state())


def test_ranks_with_seeds_of_their_own_where_the_model_draws_nothing():
    def run():
        model, optimizer = parallelize(ALIKE, made(rate=0.0), sgd)
        rank, copy = torch.distributed.get_rank(), made(rate=0.0)
        with pytest.raises(RuntimeError):
            model(torch.rand(2, 7))  # of a wrong shape: it was entered, and not left
        torch.manual_seed(rank)

        def between(step):
            if rank == 0:  # what sends nothing one rank may do alone
                with torch.no_grad():
                    copy(torch.rand(2, 5))
                    if step >= 5:
                        model(torch.rand(2, 5))

        return trained(model, optimizer, 25, between), model[4].weight.full_tensor().detach()

    alone = made(rate=0.0)
    losses = trained(alone, sgd(alone.parameters()), 25)
    for found, weight in run_ranks(2, run):
        assert found == losses
        assert torch.equal(weight, alone[4].weight)
