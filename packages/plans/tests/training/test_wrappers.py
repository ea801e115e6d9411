"""torch's own ways to distribute a model, before and on top of `parallelize`, are errors that name them."""

import copy

import pytest
import torch
from torch import nn

from vescale_plans import Plan, PlanError, parallelize
from vescale_testkit import run_ranks, warm_up

warm_up("vescale_plans", "torch.distributed.fsdp")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3))


def _fully_shard(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)


def _fully_shard_layers(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)


def _replicate(model):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(model)


def _ddp(model):
    nn.parallel.DistributedDataParallel(model)


def _ddp_of_a_layer(model):
    nn.parallel.DistributedDataParallel(model[0])


ON_TOP = {
    "fully_shard": (_fully_shard, "fully_shard: the model is parallelized"),
    "fully_shard, layers": (_fully_shard_layers, "fully_shard: the model is parallelized"),
    "replicate": (_replicate, "replicate: the model is parallelized"),
    "DDP": (_ddp, "DistributedDataParallel: the model is parallelized"),
    "DDP, a layer": (_ddp_of_a_layer, "DistributedDataParallel: the model is parallelized"),
}


def refused_on_top(call, zero, copies):
    model, _ = parallelize(Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero), build())
    model = copy.deepcopy(model) if copies else model
    with pytest.raises(PlanError) as found:
        call(model)
    model(torch.ones(4, 6)).sum().backward()  # and the model is as it was
    return str(found.value)


@pytest.mark.parametrize("case", ON_TOP)
def test_refused_on_top(case):
    call, text = ON_TOP[case]
    for zero, copies in ((0, False), (3, False), (2, True)):
        first, second = run_ranks(2, refused_on_top, call, zero, copies)
        assert first == second and text in first


def _sharded_first():
    from torch.distributed.fsdp import fully_shard

    return fully_shard(build())


BEFORE = {
    "fully_shard": (_sharded_first, "fully_shard already"),
    "DDP": (lambda: nn.parallel.DistributedDataParallel(build()), "DistributedDataParallel already"),
    "DataParallel": (lambda: nn.DataParallel(build()), "DataParallel already"),
}


def refused_before(make):
    with pytest.raises(PlanError) as found:
        parallelize(Plan(mesh={"dp": 2}, parameters={"*": {}}), make())
    return str(found.value)


@pytest.mark.parametrize("case", BEFORE)
def test_refused_before(case):
    make, text = BEFORE[case]
    first, second = run_ranks(2, refused_before, make)
    assert first == second and text in first
