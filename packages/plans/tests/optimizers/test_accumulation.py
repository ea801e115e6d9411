"""`Plan.parts`: the batch in parts, one backward each, equals the whole batch on one device."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")

ROWS, PARTS, STEPS = 12, 3, 4


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 5))


def batches():
    draws = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 6, generator=draws) for _ in range(STEPS)]


def alone():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for batch in batches():
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [one.detach() for one in model.parameters()]


def in_parts(zero):
    plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero, accumulation=PARTS)
    model, optimizer = parallelize(plan, build(), lambda given: torch.optim.AdamW(given, lr=0.05))
    losses = []
    for batch in batches():
        total = 0.0
        for part in plan.parts(batch, model):
            loss = model(part).square().mean() / plan.accumulation
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, [one.full_tensor().detach() for one in model.parameters()]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parts_add_up_to_the_batch(zero):
    losses, parameters = alone()
    found, ours = run_ranks(2, in_parts, zero)[0]
    assert found == pytest.approx(losses, rel=1e-5)
    for one, other in zip(ours, parameters):
        assert (one - other).norm() <= 1e-4 * other.norm()


def starts(zero):
    """Sums over ranks that one step of `PARTS` backwards starts."""
    from vescale_plans._zero import bucket

    count, start = [0], bucket.Bucket.start

    def counted(self):
        count[0] += 1
        return start(self)

    bucket.Bucket.start = counted
    try:
        in_parts(zero)
    finally:
        bucket.Bucket.start = start
    return count[0] / STEPS


@pytest.mark.parametrize("zero, sums", [(0, 1), (1, 1), (2, PARTS)])
def test_a_sum_that_waited_starts_once_when_the_last_gradient_is_there(zero, sums):
    assert run_ranks(2, starts, zero) == [sums, sums]


def test_a_plan_without_accumulation_has_one_part():
    plan = Plan(mesh={"dp": 1}, parameters={"*": {}})
    batch = torch.zeros(3, 2)
    (part,) = plan.parts(batch)
    assert torch.equal(part, batch)
    assert replace(plan, accumulation=3) != plan
