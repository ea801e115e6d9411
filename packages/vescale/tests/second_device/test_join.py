"""Whoever joins torch.distributed before veScale: the mesh lies on the accelerator that is there, never silently on the
host."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from vescale_testkit import free_port, slice_of

SCRIPT = """
import faulthandler, json, os, sys
faulthandler.dump_traceback_later(200, exit=True)  # where a rank stands that waits for ever
from vescale_testkit.second import register

register()
import torch
import torch.distributed as dist
from torch import nn
import vescale

BACKEND, AXIS, FOLDER, DEVICE = *sys.argv[1:], torch.device("second", 0)
if BACKEND == "device_id":
    dist.init_process_group(device_id=DEVICE)
else:
    dist.init_process_group(*[BACKEND] if BACKEND else [])
torch.manual_seed(0)
fields = {"dp": {"zero": 2}, "pp": {"pipeline": vescale.Pipeline("pp", cuts=("2",), schedule="1f1b", microbatches=2)}}
plan = vescale.Plan(mesh={"dp": 2} if AXIS == "dp" else {"pp": 2, "dp": 1}, parameters={"*": {}}, **fields[AXIS])
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))  # on the host
make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
model, optimizer = vescale.parallelize(plan, model, make, loss_fn=lambda y, x: y.square().mean())
losses = []
for step in range(4):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))  # on the host
    loss = model(x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
state = {"plan": plan, "model": model, "optimizer": optimizer}
vescale.save(FOLDER + "/saved", state)
vescale.load(FOLDER + "/saved", state)
weights = dict(model.named_parameters())
(device,) = {(w.device_mesh.device_type, str(w.device)) for w in weights.values()}
found = [device, {name: w.detach().full_tensor().tolist() for name, w in weights.items()}, losses]
with open(f"{FOLDER}/{dist.get_rank()}", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


def trained(tmp_path, backend, axis):
    """What each rank of two tells."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port = free_port()
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), backend, axis, str(tmp_path)], text=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    until = time.monotonic() + 240
    while None in (ended := [rank.poll() for rank in ranks]) and not any(ended) and time.monotonic() < until:
        time.sleep(0.1)
    for rank in ranks:  # whoever waits for one that is gone
        rank.kill()
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]


CASES = [("", "dp"), ("", "pp"), ("device_id", "dp"), ("second", "dp"), ("cpu:gloo,second:second", "dp")]


@pytest.mark.parametrize("backend, axis", slice_of(CASES, 2))
def test_a_world_that_somebody_else_joined_trains_on_the_accelerator(tmp_path, backend, axis):
    """Without a backend, torch makes one for the accelerator alone: nothing may need one for the host."""
    weights, losses = alone()
    names = set()
    for device, own, its in trained(tmp_path, backend, axis):
        assert device[0] == "second" and device[1].startswith("second")
        assert its == pytest.approx(losses, rel=1e-6)
        names |= own.keys()
        for name, values in own.items():
            torch.testing.assert_close(torch.tensor(values), weights[name], rtol=1e-6, atol=1e-7)
    assert names == weights.keys()


def alone():
    """One CPU's parameters and losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses
