"""What calls of one module read is added up over ranks once, wherever they take it apart."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import Partial, Replicate, Shard, comm_trace, distribute_tensor
from vescale_dtensor._conversions.convert import from_plain
from vescale_dtensor._conversions.memo import close_scope, open_scope
from vescale_dtensor._layouts.layout import layout_of
from vescale_dtensor._layouts.mesh import mesh_of as mesh_layout_of
from vescale_dtensor._layouts.state import INVARIANT
from vescale_testkit import mesh_of, run_ranks

ROWS, WIDTH, HEADS, EXPERTS = 8, 6, 4, 4
SHAPES = {
    "latent": (7, WIDTH), "keys": (2 * HEADS, 4), "heads": (WIDTH, 5 * HEADS),
    "up": (8, WIDTH), "down": (WIDTH, 8), "router": (2, WIDTH), "gate": (1, WIDTH),
    "ups": (EXPERTS, 8, WIDTH), "downs": (EXPERTS, WIDTH, 8),
}  # fmt: skip
CUTS = {"keys": 0, "heads": 1, "up": 0, "down": 1, "ups": 1, "downs": 2}


@contextlib.contextmanager
def module(mesh):
    """What vescale_plans opens around a module with weights that the last axis cuts."""
    open_scope((mesh.ndim - 1,) if mesh is not None else ())
    try:
        yield
    finally:
        close_scope()


def latent(p, x):
    """A latent key, which is normed before its heads are made of it, beside its part that turns, which they share."""
    latent, turned = torch.split(F.linear(x, p["latent"]), [4, 3], -1)
    keys = F.linear(F.rms_norm(latent, (4,)), p["keys"]).view(ROWS, HEADS, 2)
    keys = torch.cat([keys, turned.sin()[:, None].expand(-1, HEADS, -1)], -1)
    return F.linear(keys.flatten(1), p["heads"])


def experts(p, x):
    """Rows are dealt out, expert by expert, and what comes of them is added to zeros."""
    return dealt(p, x.sin())


def dealt(p, x):
    out = torch.zeros_like(x)
    weights = F.linear(x, p["router"]).softmax(-1)
    for expert in range(EXPERTS):
        rows = torch.arange(expert, ROWS, 3 - expert % 2)
        given = F.silu(F.linear(x[rows], p["ups"][expert]))
        given = F.linear(given, p["downs"][expert]) * weights[rows, rows % 2, None]
        out.index_add_(0, rows, given)
    return out


def beside(p, x):
    """A shared expert, and what else its rows decide: its gate, and the experts that they come to."""
    x = x.sin()
    shared = F.linear(F.silu(F.linear(x, p["up"])), p["down"])
    return shared * torch.sigmoid(F.linear(x, p["gate"])) + dealt(p, x)


def handed(p, x):
    """Parts that leave the module as they are."""
    latent, turned = torch.split(F.linear(x, p["latent"]), [4, 3], -1)
    return torch.cat([latent.sin(), turned.cos()], -1)


PROGRAMS = {"latent": latent, "experts": experts, "beside": beside, "handed": handed}


def as_it_is(run, p, x):
    return run(p, x)


def offloaded(run, p, x):
    with torch.autograd.graph.save_on_cpu():
        return run(p, x)


def again(reentrant):
    return lambda run, p, x: checkpoint(run, p, x, use_reentrant=reentrant)


HOWS = {"once": as_it_is, "offloaded": offloaded, "checkpoint": again(False), "reentrant": again(True)}


def gradients(name, how, mesh=None):
    torch.manual_seed(0)
    p = {key: torch.randn(shape, dtype=torch.float64) for key, shape in SHAPES.items()}
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    if mesh is not None:
        for key, value in p.items():
            placements = [*[Replicate()] * (mesh.ndim - 1), Shard(CUTS[key]) if key in CUTS else Replicate()]
            p[key] = distribute_tensor(value, mesh, placements)
    for one in (*p.values(), x):
        one.requires_grad_()

    def run(p, x):
        with module(mesh):
            return PROGRAMS[name](p, x)

    whole = x if mesh is None else from_plain(x, layout_of(mesh_layout_of(mesh), (INVARIANT,) * mesh.ndim, x.shape))
    with comm_trace() as trace, module(mesh):
        out = HOWS[how](run, p, whole)
        forward, layout = trace.count(), out._layout.base if mesh is not None else None
        with torch.no_grad():
            assert mesh is None or run(p, whole)._layout.base is layout
        loss = out.square().sum()
        loss.backward()
    found = {key: one.grad for key, one in (*p.items(), ("x", x)) if one.grad is not None}
    if mesh is not None:
        found = {key: one.full_tensor() if key != "x" else one for key, one in found.items()}
    return found, forward, layout.placements if layout else None, trace.count(direction="backward", kind="all_reduce")


def compared(name, how, sizes):
    mesh = mesh_of(*sizes)
    wanted, found = gradients(name, how)[0], gradients(name, how, mesh)
    assert wanted.keys() == found[0].keys()
    for key, one in wanted.items():
        torch.testing.assert_close(found[0][key], one, rtol=1e-9, atol=1e-9)
    return found[1:]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("how", HOWS)
def test_gradients_are_one_devices(name, how):
    for sizes in ((2,), (2, 2)):
        for forward, placements, _ in run_ranks(2 * len(sizes), compared, name, how, sizes):
            assert forward == 0, "an expert's sum is added up by itself"
            assert placements[-1] == (Replicate() if name == "handed" else Partial())


@pytest.mark.parametrize(
    "name, sums",
    [
        ("latent", 1),  # both parts of the latent key
        ("experts", 2),  # the rows, and the weights, which were computed before
        ("beside", 1),  # the rows: what is computed of them later is part of their sum
    ],
)
def test_what_is_read_together_is_added_up_once(name, sums):
    for *_, backward in run_ranks(2, compared, name, "once", (2,)):
        assert backward == sums


def refused():
    mesh = mesh_of(2)
    x = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()])
    part = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]).sum(0, keepdim=True).expand(4, 6)
    rows = torch.arange(4)
    written = torch.zeros_like(x)
    written += 1
    viewed = torch.zeros_like(x)
    view = viewed[0]
    found = [torch.zeros_like(x).index_add_(0, rows, part)]
    for one in (written, viewed, torch.ones_like(x)):
        found.append(one.index_add_(0, rows, part))
    assert view.placements == (Replicate(),)
    return [one.placements[0] for one in found], [one.full_tensor()[0, 0].item() for one in found], view[0].item()


def test_only_zeros_that_nobody_else_sees_take_parts():
    assert run_ranks(2, refused) == [([Partial(), Replicate(), Replicate(), Replicate()], [4, 5, 4, 5], 4)] * 2


WRITES = {
    "data": lambda z, ones: z.data.fill_(1),
    "an array": lambda z, ones: z.numpy().fill(1),
    "an array of the shard": lambda z, ones: z.to_local().numpy().fill(1),
    "dlpack": lambda z, ones: torch.from_dlpack(z).fill_(1),
    "assigned": lambda z, ones: setattr(z, "data", ones),
    "detached": lambda z, ones: z.detach().fill_(1),
    "out": lambda z, ones: torch.add(ones, 0, out=z),
}


def written_unseen():
    mesh = mesh_of(2)
    part = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]).sum(0, keepdim=True).expand(4, 6)
    found = {}
    for name, write in WRITES.items():
        ones = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()])
        zeros = torch.zeros_like(ones)
        write(zeros, ones)
        found[name] = zeros.index_add_(0, torch.arange(4), part).full_tensor().unique().tolist()
    return found


def test_what_was_written_to_zeros_unseen_is_there():
    assert run_ranks(2, written_unseen) == [{name: [5.0] for name in WRITES}] * 2
