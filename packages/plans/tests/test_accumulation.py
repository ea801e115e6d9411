"""`Plan.parts`: the batch in parts, one backward each, equals the whole batch on one device."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from vescale_dtensor import comm_trace
from vescale_dtensor.testing import run_ranks, warm_up
from vescale_plans import Plan, parallelize

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
    with comm_trace(model) as trace:
        for batch in batches():
            trace.events.clear()
            total = 0.0
            for part in plan.parts(batch, model):
                loss = model(part).square().mean() / plan.accumulation
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    reductions = sum(event.count for event in trace.events if event.cause.function == "gradient sync")
    return losses, [one.full_tensor().detach() for one in model.parameters()], reductions


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parts_add_up_to_the_batch(zero):
    losses, parameters = alone()
    found, ours, _ = run_ranks(2, in_parts, zero)[0]
    assert found == pytest.approx(losses, rel=1e-5)
    for one, other in zip(ours, parameters):
        assert (one - other).norm() <= 1e-4 * other.norm()


def test_gradients_that_stay_whole_are_reduced_once_a_step():
    once, often = (run_ranks(2, in_parts, zero)[0][2] for zero in (1, 2))
    assert once * PARTS == often > 0


def test_a_plan_without_accumulation_has_one_part():
    plan = Plan(mesh={"dp": 1}, parameters={"*": {}})
    batch = torch.zeros(3, 2)
    (part,) = plan.parts(batch)
    assert torch.equal(part, batch)
    assert replace(plan, accumulation=3) != plan
