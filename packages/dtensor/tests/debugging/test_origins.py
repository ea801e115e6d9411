"""`explain` says where a layout came from: functions, lines, operands, what was sent; recording changes nothing."""

import torch
from torch import nn

import vescale_dtensor as vd
from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks, warm_up

warm_up("vescale_dtensor")


class Net(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(distribute_tensor(torch.randn(16, 8), mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(8, 16), mesh, [Shard(1)]))

    def forward(self, x):
        self.hidden = nn.functional.linear(x, self.up).relu()
        self.out = nn.functional.linear(self.hidden, self.down)
        return self.out.tanh()


def _explained():
    mesh = mesh_of(2, names=("tp",))
    net, x = Net(mesh), distribute_tensor(torch.ones(4, 8), mesh, [Replicate()])
    with vd.explaining(net):
        y = net(x)
        moved = net.hidden.redistribute([Replicate()])
        own = (net.out + 1).detach().clone()
        own.add_(net.out)
        left, right = net.hidden.chunk(2)
        same = torch.einsum("bh,bh->b", left, right)
    return {
        name: str(vd.explain(tensor))
        for name, tensor in {
            "out": net.out,
            "y": y,
            "moved": moved,
            "own": own,
            "up": net.up,
            "x": x,
            "same": same,
        }.items()
    }


def test_every_axis_has_its_reason_and_every_call_its_line():
    said = run_ranks(2, _explained)
    assert said[0] == said[1]
    out, y, moved, own, same = (said[0][name].splitlines() for name in ("out", "y", "moved", "own", "same"))
    assert out[0].startswith("[4, 8] P on (tp=2), by linear at") and "test_origins.py:" in out[0]
    assert out[1] == "  tp: partial: linear sums over what is sharded there in what relu gave and down"
    assert any(line.strip() == "tp: sharded, as up" for line in out)
    assert "  down: [8, 16] S(1) on (tp=2)" in out
    assert y[1] == (
        "  tp: full: tanh is given what linear gave in parts, and needs or makes it full; "
        "all_reduce, 128 bytes received"
    )
    assert "by redistribute" in moved[0] and moved[2] == "  what relu gave:"
    assert "by add_" in own[0]
    assert "was not recorded" in said[0]["x"] and "vescale.explaining(model)" in said[0]["x"]
    assert moved[1] == "  tp: S(1) -> R, which redistribute asks for; all_gather, 128 bytes received"
    assert "S(0) on (tp=2), a parameter: as the plan" in said[0]["up"]
    assert same[1] == "  tp: partial: einsum sums over what is sharded there in what chunk gave and what chunk gave"


def _trained(recorded):
    mesh = mesh_of(2, names=("tp",))
    net = Net(mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        x = distribute_tensor(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)), mesh, [Replicate()])
        if recorded:
            with vd.explaining(net):
                loss = net(x).square().mean()
        else:
            loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = net(x)
    return loss.item(), net.up.detach().full_tensor(), vd.explain(plain).origin is None


def test_recording_changes_nothing_and_ends():
    (loss, up, ended), (other, same, _) = run_ranks(2, _trained, True)[0], run_ranks(2, _trained, False)[0]
    assert loss == other and torch.equal(up, same) and ended


def test_a_plain_tensor_is_all_here():
    assert "as on one device" in str(vd.explain(torch.ones(2)))
