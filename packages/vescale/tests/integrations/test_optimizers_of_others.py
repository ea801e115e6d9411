"""Optimizers and layers of torchao and bitsandbytes under plans, against one device."""

import pytest
import torch
from torch import nn

import vescale
from vescale_testkit import run_ranks, slice_of, warm_up

pytest.importorskip("torchao", reason="these tests are of torchao")
pytest.importorskip("bitsandbytes", reason="these tests are of bitsandbytes")
warm_up("vescale", "torchao.optim", "torchao.quantization", "torchao.float8", "bitsandbytes")

LOSS, PARAMETER = 1e-5, 1e-4  # the standard tolerances of docs/design.md, section 11
SHARDED = {"0.weight": {"tp": vescale.Shard(0)}, "0.bias": {"tp": vescale.Shard(0)},
           "2.weight": {"tp": vescale.Shard(1)}, "*": {}}  # fmt: skip
PLANS = {
    "dp2 zero 1": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=1),
    "dp2 zero 3": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3),
    "tp2": vescale.Plan(mesh={"tp": 2}, parameters=SHARDED),
    "dp2 tp2 zero 3": vescale.Plan(mesh={"dp": 2, "tp": 2}, parameters=SHARDED, zero=3),
}
SMALL, LARGE = 16, 64
"""Widths: states of less than 4,096 elements are not quantised."""


def kinds():
    import bitsandbytes.optim as bnb
    import torchao.optim as ao

    return {
        "bnb.AdamW": bnb.AdamW, "bnb.Lion": bnb.Lion, "bnb.AdamW8bit": bnb.AdamW8bit, "ao.AdamW8bit": ao.AdamW8bit,
        "ao.AdamW4bit": ao.AdamW4bit, "ao.AdamWFp8": ao.AdamWFp8,
    }  # fmt: skip


def net(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def trained(model, optimizer, width, steps=10):
    losses = []
    for step in range(steps):
        inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def apart(one, model, wanted, losses):
    return max(abs(a - b) / b for a, b in zip(losses, wanted)), max(
        ((q.detach().full_tensor() - p.detach()).norm() / p.detach().norm()).item()
        for p, q in zip(one.parameters(), model.parameters(), strict=True)
    )


def compared(kind, plan, width, is_registered):
    kind = type(kind, (kinds()[kind],), {})  # registering a class stays in the process
    if is_registered:
        vescale.register_elementwise(kind)
    make = lambda parameters: kind(parameters, lr=1e-2)
    torch.compiler.set_stance("force_eager")  # torchao compiles each step
    try:
        one = net(width)
        wanted = trained(one, make(one.parameters()), width)
        model, optimizer = vescale.parallelize(PLANS[plan], net(width), make)
        return apart(one, model, wanted, trained(model, optimizer, width))
    finally:
        torch.compiler.set_stance("default")


ALIKE = [(kind, SMALL, True) for kind in ("bnb.AdamW", "bnb.Lion", "bnb.AdamW8bit", "ao.AdamW8bit", "ao.AdamW4bit")]
ALIKE += [(kind, LARGE, True) for kind in ("bnb.AdamW", "bnb.Lion")]
ALIKE += [(kind, LARGE, False) for kind in ("bnb.AdamW", "bnb.Lion")]
CASES = [(plan, *case) for case in ALIKE for plan in PLANS]


@pytest.mark.parametrize(("plan", "kind", "width", "is_registered"), slice_of(CASES, 6))
def test_steps_as_on_one_device(plan, kind, width, is_registered):
    answers = run_ranks(PLANS[plan].world_size, compared, kind, plan, width, is_registered, timeout=120)
    for loss, parameter in answers:
        assert loss <= LOSS and parameter <= PARAMETER


@pytest.mark.parametrize("kind", ["ao.AdamW8bit", "bnb.AdamW8bit"])
def test_blocks_are_those_of_the_parts(kind):
    """Which elements share a scale follows from the cut: within the states' eight bits of one device, and no nearer."""
    for loss, parameter in run_ranks(2, compared, kind, "dp2 zero 3", LARGE, True, timeout=120):
        assert loss <= 1e-2 and parameter <= 5e-2


def refused(plan):
    with pytest.raises(vescale.PlanError) as found:
        compared("ao.AdamW8bit", plan, LARGE, False)
    return str(found.value)


@pytest.mark.parametrize("plan", ["dp2 zero 3", "tp2"])
def test_one_that_cannot_step_on_shards_names_the_line(plan):
    for told in run_ranks(2, refused, plan, timeout=120):
        assert "vescale.register_elementwise(ao.AdamW8bit)" in told


def float8(plan, when):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    converted = lambda model: convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    one = converted(net(LARGE))
    wanted = trained(one, make(one.parameters()), LARGE)
    model = net(LARGE) if when == "after" else converted(net(LARGE))
    model, optimizer = vescale.parallelize(PLANS[plan], model, make)
    if when == "after":
        converted(model)
    return apart(one, model, wanted, trained(model, optimizer, LARGE))


@pytest.mark.parametrize("plan", PLANS)
def test_float8_linears_train_as_on_one_device(plan):
    """Scales are of whole tensors: they are gathered."""
    for when in ("before", "after"):
        for loss, parameter in run_ranks(PLANS[plan].world_size, float8, plan, when, timeout=120):
            assert loss <= LOSS and parameter <= PARAMETER


def quantised(plan):
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        quantize_,
    )

    told = []
    inputs = torch.randn(8, LARGE, generator=torch.Generator().manual_seed(1))
    for config in (Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, IntxWeightOnlyConfig,
                   Float8WeightOnlyConfig):  # fmt: skip
        before = net(LARGE)
        quantize_(before, config())
        with pytest.raises(vescale.PlanError) as found:
            vescale.parallelize(PLANS[plan], before)
        told.append(str(found.value))
        after, _ = vescale.parallelize(PLANS[plan], net(LARGE))
        quantize_(after, config())
        with pytest.raises(vescale.PlainTensorError) as found:
            after(inputs)
        told.append(str(found.value))
    # What the errors say: of the whole state, a model of one device, which is quantised.
    sharded, _ = vescale.parallelize(PLANS[plan], net(LARGE))
    state = vescale.whole_state_dict(sharded)
    if torch.distributed.get_rank():
        return told
    one, wanted = net(LARGE), net(LARGE)
    for parameter in one.parameters():
        parameter.data.zero_()
    one.load_state_dict(state)
    for model in (one, wanted):
        quantize_(model, Int8WeightOnlyConfig())
    assert torch.equal(one(inputs), wanted(inputs))
    return told


@pytest.mark.parametrize("plan", ["dp2 zero 1", "dp2 zero 3", "tp2"])
def test_quantised_weights_are_of_one_device(plan):
    first, second = run_ranks(2, quantised, plan, timeout=120)
    assert first == second
    for told in first:
        assert "torchao's " in told and "vescale.whole_state_dict(model)" in told


def fake_quantised(plan, when):
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    def prepared(model):
        activation = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
        weight = IntxFakeQuantizeConfig(torch.int4, group_size=32)
        quantize_(model, QATConfig(activation_config=activation, weight_config=weight, step="prepare"))
        return model

    make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    one = prepared(net(LARGE))
    wanted = trained(one, make(one.parameters()), LARGE)
    model = net(LARGE) if when == "after" else prepared(net(LARGE))
    model, optimizer = vescale.parallelize(PLANS[plan], model, make)
    if when == "after":
        prepared(model)
    return apart(one, model, wanted, trained(model, optimizer, LARGE))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("plan", ["dp2 zero 3", "tp2"])
def test_training_for_quantised_weights_is_one_devices(plan, when):
    for loss, parameter in run_ranks(2, fake_quantised, plan, when, timeout=120):
        assert loss <= LOSS and parameter <= PARAMETER
