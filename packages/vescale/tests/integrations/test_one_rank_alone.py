"""A weight that one rank alone writes: an error on all ranks that names it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("vescale")

PLANS = {
    "dp": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}),
    "zero 1": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=1),
    "zero 2": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=2),
    "tp": vescale.Plan(mesh={"tp": 2}, parameters={"0.weight": {"tp": vescale.Shard(0)}, "*": {}}),
    "dp tp": vescale.Plan(mesh={"dp": 2, "tp": 2}, parameters={"0.weight": {"tp": vescale.Shard(0)}, "*": {}}),
    "two data axes, zero 3": vescale.Plan(
        mesh={"far": 2, "near": 2}, parameters={"*": {}}, data_axis=("far", "near"), zero=3
    ),
}


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))


def _step(model, optimizer):
    loss = model(torch.ones(8, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _scaled(parameter):
    with torch.no_grad():
        parameter.mul_(2)


def _data_scaled(parameter):
    parameter.data.mul_(2)


def _one_element(parameter):
    with torch.no_grad():
        parameter.to_local().view(-1)[-1:].add_(1)


WRITES = {"in place": _scaled, "by its data": _data_scaled, "one element": _one_element}


def _written_alone(plan, write):
    model, optimizer = vescale.parallelize(PLANS[plan], _net(), lambda p: torch.optim.SGD(p, lr=0.1))
    _step(model, optimizer)
    if dist.get_rank() == dist.get_world_size() - 1:
        WRITES[write](model[2].weight)
    with pytest.raises(vescale.PlainTensorError) as found:
        _step(model, optimizer)
    return str(found.value)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_weight_written_on_one_rank(plan, write):
    ranks = 2 if len(PLANS[plan].mesh) == 1 else 4
    texts = run_ranks(ranks, _written_alone, plan, write, timeout=60)
    assert len(set(texts)) == 1 and "'2.weight'" in texts[0] and "fix" in texts[0], texts


def _written_everywhere(plan):
    model, optimizer = vescale.parallelize(PLANS[plan], _net(), lambda p: torch.optim.SGD(p, lr=0.1))
    for _ in range(2):
        for write in WRITES.values():
            write(model[2].weight)
        _step(model, optimizer)


@pytest.mark.parametrize("plan", PLANS)
def test_a_weight_written_on_all_ranks(plan):
    run_ranks(2 if len(PLANS[plan].mesh) == 1 else 4, _written_everywhere, plan, timeout=60)
