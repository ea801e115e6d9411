"""A DCP folder that FSDP2 wrote, optimizer and groups included, goes on under any plan as FSDP2 would have."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("vescale", "torch.distributed.checkpoint", "torch.distributed.fsdp")
STEPS = 2


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.LayerNorm(6))


def optimizer_of(model, scale=1.0):
    """Two groups; `scale` makes options that a load has to replace."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.3 * scale},
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.05 * scale, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.02 * scale)


def step(model, optimizer, number):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    model(x).sum(-1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def fsdp2(path, form, key):
    """Saves after STEPS; the parameters one step later."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    model = made()
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(model)
    for number in range(STEPS):
        step(model, optimizer, number)
    if form == "numbers":
        states = model.state_dict(), optimizer.state_dict()
    else:
        states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=form == "flat"))
    dcp.save({"model": states[0], key: states[1]}, checkpoint_id=path)
    step(model, optimizer, STEPS)
    return [p.full_tensor().detach() for p in model.parameters()]


def goes_on(path, zero, key):
    model = made()
    for parameter in model.parameters():
        nn.init.zeros_(parameter.data)
    plan = vescale.Plan(
        mesh={"dp": dist.get_world_size() if dist.is_initialized() else 1}, parameters={"*": {}}, zero=zero
    )
    model, optimizer = vescale.parallelize(plan, model, optimizer_of(model, 7.0))
    report = vescale.load(path, {"model": model, key: optimizer})
    assert {f"{key}.groups.0", f"{key}.groups.1"} <= set(report.matched) and not report.missing and not report.extra
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.05]
    step(model, optimizer, STEPS)
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.parametrize(("form", "key"), [("names", "optimizer"), ("flat", "optim"), ("numbers", "optimizer")])
def test_training_goes_on_as_fsdp2s(tmp_path, form, key):
    wanted = run_ranks(2, fsdp2, f"{tmp_path}/dcp", form, key)[0]
    for ranks, zero in ((2, 2), (2, 3), (1, 1)):
        for found in run_ranks(ranks, functools.partial(goes_on, f"{tmp_path}/dcp", zero, key)):
            torch.testing.assert_close(found, wanted)


def other_groups(path):
    model = made()
    plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3)
    model, optimizer = vescale.parallelize(plan, model, torch.optim.AdamW(model.parameters()))
    before = [p.full_tensor().detach() for p in model.parameters()]
    with pytest.raises(vescale.MismatchError, match=r"numbers.*\[2, 4\].*\[6\].*get_state_dict"):
        vescale.load(path, {"model": model, "optimizer": optimizer})
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before)) and not optimizer.state


def test_numbers_of_other_groups_are_refused(tmp_path):
    run_ranks(2, fsdp2, f"{tmp_path}/dcp", "numbers", "optimizer")
    run_ranks(2, other_groups, f"{tmp_path}/dcp")
