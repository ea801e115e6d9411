"""What people do who come from one device, or from other libraries: one device's result, or one typed error on all
ranks that says the line to write. Nothing is silent, and nothing waits."""

import io
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("vescale", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")

PLANS = {
    "dp": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}),
    "zero 3": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3),
    "tp": vescale.Plan(
        mesh={"tp": 2},
        parameters={
            "up.weight": {"tp": vescale.Shard(0)},
            "up.bias": {"tp": vescale.Shard(0)},
            "down.weight": {"tp": vescale.Shard(1)},
            "*": {},
        },
    ),
}
STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def build():
    torch.manual_seed(0)
    return Net()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def sharded(plan):
    return vescale.parallelize(plan, build(), adamw)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)


def trained(model, optimizer, each=lambda model: None):
    """Losses, and whole parameters."""
    losses = []
    for step in range(STEPS):
        inputs, labels = batch(step)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        each(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return losses, [one.clone() for one in whole]


def text(what):
    """Of an error with a remedy; it must be veScale's."""
    with pytest.raises(vescale.VescaleError) as found:
        what()
    assert "fix" in str(found.value), found.value
    return str(found.value)


# --- errors: what is called, and what the error says -------------------------------------------


def torchs(plan):
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(batch(0)[0], dist.init_device_mesh("cpu", (2,)), [Replicate()])


def of_torchs_shards(plan):
    from torch.distributed.tensor import distribute_module

    return vescale.parallelize(plan, distribute_module(build(), dist.init_device_mesh("cpu", (2,))), adamw)


def with_scheduler(plan):
    model = build()
    return vescale.parallelize(plan, model, torch.optim.lr_scheduler.StepLR(adamw(model.parameters()), 1))


def with_parameters(plan):
    model = build()
    return vescale.parallelize(plan, model, list(model.parameters()))


def on_meta(plan):
    with torch.device("meta"):
        model = build()
    return vescale.parallelize(plan, model, adamw)


def partly_on_meta(plan):
    model = build()
    model.register_buffer("table", torch.empty(3, device="meta"))
    return vescale.parallelize(plan, model, adamw)


def compiled_block(plan):
    model = build()
    model.up.compile()
    return vescale.parallelize(plan, model, adamw)


def own_rows(plan):
    rows = batch(0)[0][dist.get_rank() * 4 :][:4]
    return sharded(plan)[0](rows)


def other_seed(plan):
    torch.manual_seed(dist.get_rank())
    return vescale.parallelize(plan, Net(), adamw)


def fully_sharded(plan):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(sharded(plan)[0])


def of_the_wrong_size(plan):
    return vescale.parallelize(plan.override(mesh=dict.fromkeys(plan.mesh, 4)), build(), adamw)


def with_a_glob_of_nothing(plan):
    return vescale.parallelize(plan.override(parameters={"upp.weight": {}}), build(), adamw)


def pickled(plan):
    model, _ = vescale.parallelize(plan.override(parameters={"*": {}}), nn.Sequential(nn.Linear(6, 4)))
    torch.save(model, io.BytesIO())  # of a class that pickle finds by its name


ERRORS = {
    "plan and model swapped": (lambda plan: vescale.parallelize(build(), plan, adamw), "is a Plan, not nn.Module"),
    "a dict for a plan": (lambda plan: vescale.parallelize(plan.mesh, build(), adamw), "not Plan"),
    "no plan": (lambda plan: vescale.parallelize(None, build(), adamw), "plan is None, not Plan"),
    "a class for a model": (lambda plan: vescale.parallelize(plan, Net, adamw), "is the class Net, not nn.Module"),
    "a scheduler for a factory": (with_scheduler, "is a StepLR"),
    "parameters for a factory": (with_parameters, "is [a Parameter"),
    "a number for a factory": (lambda plan: vescale.parallelize(plan, build(), 0.02), "is 0.02"),
    "another model's optimizer": (
        lambda plan: vescale.parallelize(plan, build(), adamw(build().parameters())),
        "none of the model's",
    ),
    "a factory of nothing": (lambda plan: vescale.parallelize(plan, build(), lambda p: None), "returned None"),
    "a factory of several": (lambda plan: vescale.parallelize(plan, build(), lambda p: [adamw(p)]), "vescale.adopt"),
    "a factory of a scheduler": (
        lambda plan: vescale.parallelize(plan, build(), lambda p: torch.optim.lr_scheduler.StepLR(adamw(p), 1)),
        "returned a StepLR",
    ),
    "a factory for another model": (
        lambda plan: vescale.parallelize(plan, build(), lambda p: adamw(nn.Linear(2, 2).parameters())),
        "it trains nothing",
    ),
    "parallelized twice": (lambda plan: vescale.parallelize(plan, sharded(plan)[0], adamw), "parallelized already"),
    "fully_shard on top": (fully_sharded, "leave fully_shard out"),
    "DDP on top": (lambda plan: nn.parallel.DistributedDataParallel(sharded(plan)[0]), "DistributedDataParallel"),
    "compiled before": (lambda plan: vescale.parallelize(plan, torch.compile(build()), adamw), 'mode="compile"'),
    "a block compiled before": (compiled_block, "up is already compiled"),
    "torch.compile on top": (lambda plan: torch.compile(sharded(plan)[0]), 'mode="compile"'),
    "model.compile on top": (lambda plan: sharded(plan)[0].compile(), 'mode="compile"'),
    "a block compiled on top": (lambda plan: sharded(plan)[0].up.compile(), 'mode="compile"'),
    "torch.compile of a block on top": (lambda plan: torch.compile(sharded(plan)[0].up), 'mode="compile"'),
    "on meta": (on_meta, "deferred_init"),
    "a buffer on meta": (partly_on_meta, "on meta  table"),
    "torch's DTensor for a batch": (lambda plan: sharded(plan)[0](torchs(plan)), "torch's DTensor entered"),
    "a model of torch's DTensors": (of_torchs_shards, "'up.weight' is torch's DTensor"),
    "each rank its own rows": (own_rows, "plan.local_batch"),
    "another seed on each rank": (other_seed, "torch.manual_seed"),
    "a mesh of another size": (of_the_wrong_size, "--nproc-per-node 4"),
    "a misspelled name": (with_a_glob_of_nothing, "up.weight"),
    "torch.save(model)": (pickled, "vescale.save"),
    "torch.save(optimizer)": (lambda plan: torch.save(sharded(plan)[1], io.BytesIO()), "vescale.save"),
}


def every_error(plan):
    found = {}
    for name, (call, expected) in ERRORS.items():
        began = time.monotonic()
        found[name] = text(lambda call=call: call(PLANS[plan]))
        assert expected in found[name], (name, found[name])
        assert time.monotonic() - began < 30, name
    trained(*sharded(PLANS[plan]))  # after all of which the world is as it was
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_an_error_that_says_the_line(plan):
    first, second = run_ranks(2, every_error, plan, timeout=120)
    assert first == second


def compiled_step(plan):
    """The tracer of torch.compile wraps what it hears in an error of its own, with the line of the user's code."""
    model, optimizer = sharded(PLANS[plan])
    inputs, labels = batch(0)
    whole = torch.compile(lambda: nn.functional.cross_entropy(model(inputs), labels).backward(), backend="eager")
    block = torch.compile(lambda: model.up(inputs), backend="eager")
    found = []
    for function in (whole, block):
        with pytest.raises(Exception, match="a compiled function uses a parallelized model") as raised:
            function()
        found.append('mode="compile"' in str(raised.value))
    torch._dynamo.reset()
    trained(model, optimizer)
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_a_compiled_step_says_the_line(plan):
    assert run_ranks(2, compiled_step, plan, timeout=120) == [[True, True]] * 2


# --- right: what is called does what it does on one device -------------------------------------


def with_groups(model):
    """Weight decay for some, told by the parameters of before."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def factory_of_groups(plan):
    model = build()
    groups = with_groups(model)
    if plan is None:
        return trained(model, adamw(groups))
    return trained(*vescale.parallelize(plan, model, lambda parameters: adamw(groups)))


def optimizer_in_place_of_a_factory(plan):
    model = build()
    optimizer = adamw(model.parameters())
    if plan is not None:
        vescale.parallelize(plan, model, optimizer)
    return trained(model, optimizer)


def pair(plan):
    if plan is not None:
        return sharded(plan)
    model = build()
    return model, adamw(model.parameters())


def halved(model):
    for parameter in model.parameters():
        parameter.grad = parameter.grad / 2


def halved_in_place(model):
    for parameter in model.parameters():
        parameter.grad /= 2


def another_weight(plan):
    model, optimizer = pair(plan)
    torch.manual_seed(5)
    model.down.weight = nn.Parameter(torch.randn(4, 16))
    return trained(model, optimizer)


def another_layer(plan):
    model, optimizer = pair(plan)
    torch.manual_seed(5)
    model.down = nn.Linear(16, 4)
    optimizer.add_param_group({"params": list(model.down.parameters())})
    return trained(model, optimizer)


def plain_state_loaded(plan):
    model, optimizer = pair(plan)
    torch.manual_seed(5)
    model.load_state_dict(Net().state_dict())
    return trained(model, optimizer)


def saved_before_the_first_step(plan, folder=None):
    model, optimizer = pair(plan)
    if plan is not None:
        vescale.save(folder, {"model": model, "optimizer": optimizer})
        model, optimizer = sharded(plan)
        vescale.load(folder, {"model": model, "optimizer": optimizer})
    return trained(model, optimizer)


RIGHT = {
    "a factory of groups from before": factory_of_groups,
    "an optimizer in place of a factory": optimizer_in_place_of_a_factory,
    "gradients halved by hand": lambda plan: trained(*pair(plan), each=halved),
    "gradients halved in place": lambda plan: trained(*pair(plan), each=halved_in_place),
    "another weight afterwards": another_weight,
    "another layer afterwards": another_layer,
    "a plain state loaded": plain_state_loaded,
}


def as_one_device(plan, folder):
    cases = {**RIGHT, "saved before the first step": lambda plan: saved_before_the_first_step(plan, folder)}
    found = {}
    for name, case in cases.items():
        (losses, parameters), (wanted, reference) = case(PLANS[plan]), case(None)
        found[name] = (
            max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)),
            max(((a - b).norm() / b.norm()).item() for a, b in zip(parameters, reference, strict=True)),
        )
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_one_devices_result(plan, tmp_path):
    for found in run_ranks(2, as_one_device, plan, str(tmp_path), timeout=120):
        assert all(loss <= 1e-5 and parameter <= 1e-4 for loss, parameter in found.values()), found


def reduced_twice(plan):
    """The sum over ranks of a loss that is global already, as scripts of DDP take it."""
    model, _ = sharded(PLANS[plan])
    inputs, labels = batch(0)
    loss = nn.functional.cross_entropy(model(inputs), labels).detach()
    value = loss.item()
    with pytest.warns(UserWarning, match="counted once"):
        dist.all_reduce(loss)
    return value, loss.item()


@pytest.mark.parametrize("plan", PLANS)
def test_a_global_loss_is_counted_once(plan):
    for value, reduced in run_ranks(2, reduced_twice, plan):
        assert value == reduced
