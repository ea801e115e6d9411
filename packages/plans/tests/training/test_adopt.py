"""Optimizers that `parallelize` did not make: taken over, adopted, followed, or told that they train nothing."""

import copy
import itertools

import pytest
import torch
from torch import nn

from vescale_dtensor import Shard
from vescale_plans import Plan, PlanError, Precision, adopt, parallelize
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("vescale_plans")

MAKE = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),  # not elementwise
}
SHARDED = {"0.weight": {"tp": Shard(0)}, "0.bias": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "*": {}}
PLANS = {
    "tp": Plan(mesh={"tp": 2}, parameters=SHARDED),
    **{f"zero {zero}": Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero) for zero in range(4)},
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3))


def step(model, optimizer, scheduler, i):
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(i))
    model(batch).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def errors(model, reference):
    return max(
        ((mine.detach().full_tensor() - one.detach()).norm() / one.detach().norm()).item()
        for mine, one in zip(model.parameters(), reference.parameters())
    )


def trained(plan, kind, way, before=0):
    """The error of parameters after four steps, of which `before` were taken before parallelize."""
    model, reference = build(), build()
    make = MAKE[kind]
    if way == "given":
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        for i in range(before):
            step(model, optimizer, scheduler, i)
        model, same = parallelize(plan, model, optimizer)
        assert same is optimizer and optimizer._on_dtensors == (kind == "adafactor")
    else:
        model, _ = parallelize(plan, model)
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        for i in range(before):
            step(model, optimizer, scheduler, i)
        if way == "adopted":
            assert adopt(model, optimizer) is optimizer and adopt(model, optimizer) is optimizer
            assert optimizer._on_dtensors == (kind == "adafactor")
    for i in range(before, 4):
        step(model, optimizer, scheduler, i)
    one = make(reference.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(one, 1, 0.9)
    for i in range(4):
        step(reference, one, schedule, i)
    return errors(model, reference)


CASES = [
    (plan, kind, way, before)
    for plan, kind, (way, before) in itertools.product(
        PLANS, MAKE, [("given", 0), ("given", 2), ("adopted", 0), ("adopted", 2), ("left alone", 0)]
    )
]


@pytest.mark.parametrize(("plan", "kind", "way", "before"), slice_of(CASES, 5))
def test_trains_as_one_device(plan, kind, way, before):
    assert max(run_ranks(2, trained, PLANS[plan], kind, way, before)) <= 1e-6


def by_closures(model, optimizer):
    """All losses that the optimizer asked for in three steps."""
    losses = []
    for i in range(3):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(i))

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = (model(batch) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    return losses


def with_lbfgs(plan):
    """LBFGS keeps its parameters beside its groups."""
    model, reference = build(), build()
    mine, one = (torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=3) for net in (model, reference))
    parallelize(plan, model, mine)
    return by_closures(model, mine), by_closures(reference, one), errors(model, reference)


@pytest.mark.parametrize("plan", PLANS)
def test_what_an_optimizer_keeps_beside_its_groups_is_taken_over(plan):
    for losses, wanted, error in run_ranks(2, with_lbfgs, PLANS[plan]):
        assert len(wanted) > 3 and losses == pytest.approx(wanted, rel=1e-4) and error <= 1e-4


def mixed(zero, adopts):
    """Of an optimizer made after parallelize, under a precision, against parallelize's own."""
    plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero, precision=Precision(compute=torch.bfloat16))
    first, second = build(), build()
    first, optimizer = parallelize(plan, first, MAKE["adamw"])
    second, _ = parallelize(plan, second)
    other = MAKE["adamw"](second.parameters())
    if adopts:
        adopt(second, other)
    for model, each in ((first, optimizer), (second, other)):
        scheduler = torch.optim.lr_scheduler.StepLR(each, 1, 0.9)
        for i in range(4):
            step(model, each, scheduler, i)
    return all(torch.equal(a.detach().full_tensor(), b.detach().full_tensor())
               for a, b in zip(first.parameters(), second.parameters()))  # fmt: skip


@pytest.mark.parametrize("adopts", [False, True])
@pytest.mark.parametrize("zero", range(4))
def test_masters_follow_an_optimizer_that_parallelize_did_not_make(zero, adopts):
    assert all(run_ranks(2, mixed, zero, adopts))


def refused(call):
    plan = PLANS["zero 2"]
    model = build()
    early = MAKE["adamw"](model.parameters())
    with pytest.raises(PlanError) as found:
        call(plan, model, early)
    return str(found.value)


def _of_another_model(plan, model, early):
    parallelize(plan, copy.deepcopy(model), early)


def _given_twice(plan, model, early):
    parallelize(plan, model, early)
    parallelize(plan, build(), early)


def _adopted_by_another(plan, model, early):
    model, _ = parallelize(plan, model)
    adopt(model, MAKE["adamw"](build().parameters()))


def _not_parallelized(plan, model, early):
    adopt(model, early)


def _replaced_step(plan, model, early):
    step = early.step
    early.step = lambda: step()
    parallelize(plan, model, early)


REFUSED = {
    "another model": (_of_another_model, "holds none of the model's parameters"),
    "given twice": (_given_twice, "is another parallelized model's parameters"),
    "adopted by another": (_adopted_by_another, "holds none of the model's parameters"),
    "not parallelized": (_not_parallelized, "the model is not parallelized"),
    "step replaced": (_replaced_step, "the step of the AdamW was replaced"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, text = REFUSED[case]
    first, second = run_ranks(2, refused, call)
    assert first == second and text in first
