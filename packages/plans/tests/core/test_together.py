"""What fails on one rank during parallelize fails on all of them, with one message, at once."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_dtensor import PlainTensorError, Shard
from vescale_plans import Plan, PlanError, parallelize
from vescale_testkit import RankError, raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")

PLAN = Plan({"dp": 2, "tp": 2}, {"up.*": {"tp": Shard(0)}, "*": {}})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x):
        return self.up(x)


def made():
    torch.manual_seed(0)
    return Net()


def on_rank(rank):
    return dist.get_rank() == rank


def test_the_optimizer_fails_on_one_rank():
    def run():
        def optimizer_fn(parameters):
            if on_rank(2):
                raise ValueError("learning rate is missing")
            return torch.optim.SGD(parameters, lr=0.1)

        parallelize(PLAN, made(), optimizer_fn)

    started = time.monotonic()
    assert raises_on_all(4, PlanError, run) == (
        "parallelize: rank 2 failed while making the optimizer: ValueError: learning rate is missing\n"
        "  1 of 4 ranks failed: 2\n"
        "fix: see the traceback of rank 2  # the other ranks stopped because it did"
    )
    assert time.monotonic() - started < 30


def test_what_fails_alike_everywhere_is_raised_as_it_is():
    def run():
        parallelize(PLAN, made(), lambda parameters: torch.optim.SGD(parameters, lr=-1))

    assert raises_on_all(4, ValueError, run) == "Invalid learning rate: -1"


def test_a_plan_that_does_not_fit_on_one_rank():
    def run():
        model = made()
        if on_rank(3):
            model.more = nn.Linear(2, 2)
            del model.up
        parallelize(PLAN, model)

    assert raises_on_all(4, PlanError, run) == (
        "Plan: the pattern 'up.*' matches no parameter of the model\n"
        "  there are  more.weight, more.bias\n"
        "fix: remove the pattern"
    )


def test_ranks_with_other_plans():
    def run():
        plan = PLAN.override(parameters={"up.bias": {}}) if on_rank(1) else PLAN
        parallelize(plan, made())

    assert raises_on_all(4, PlanError, run) == (
        "parallelize: rank 1 was given a different plan than rank 0\n"
        "  parameters['up.bias']  absent  -> Replicate()\n"
        "fix: make the plan from values that are equal on all ranks  # not from a rank, a host or a clock"
    )


def test_ranks_with_more_parameters():
    def run():
        model = made()
        if on_rank(1):
            model.more = nn.Linear(2, 2)
        parallelize(PLAN, model)

    assert "2 parameters on rank 0, 4 on rank 1" in raises_on_all(4, PlainTensorError, run)


def test_a_rank_that_dies():
    def run():
        def optimizer_fn(parameters):
            if on_rank(1):
                os._exit(3)
            return torch.optim.SGD(parameters, lr=0.1)

        parallelize(Plan({"tp": 2}, {"*": {}}), made(), optimizer_fn)

    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(2, run, timeout=40)
    assert caught.value.rank == 1 and caught.value.exit_code == 3
    assert "rank 0 raised" in str(caught.value)
    assert "a rank went away, or did not answer in time, while making the optimizer" in str(caught.value)
    assert time.monotonic() - started < 30
