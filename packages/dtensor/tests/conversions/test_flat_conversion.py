"""Flat ragged tensors on real ranks: conversions forward and backward, and functions. Oracle: one device."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from vescale_dtensor import DTensor, Partial, RaggedShard, Replicate, ShapeError, Shard, distribute_tensor
from vescale_testkit import mesh_of, raises_on_all, run_ranks

UNITS = [(11, 13), (24, 0), (0, 24), (12, 12)]


def conversions():
    """Every way between flat and other layouts, forward and the gradient, on 2x2."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    whole = torch.arange(48.0).view(8, 6)
    weights = torch.randn(8, 6)
    flats = [(RaggedShard((0, 1), units), Shard(1)) for units in UNITS]
    flats += [(Shard(0), RaggedShard((0, 1), (20, 4))), (RaggedShard((0, 1), (7, 41)), Replicate())]
    others = [(Replicate(), Replicate()), (Shard(0), Shard(0)), (Shard(1), Replicate()), (Replicate(), Shard(1))]
    for source, target in itertools.permutations(flats + others, 2):
        x = distribute_tensor(whole, mesh, source).requires_grad_()
        y = x.redistribute(target)
        assert y.placements == distribute_tensor(whole, mesh, target).placements
        with torch.no_grad():
            mine = y.detach().to_local()
            assert torch.equal(mine, distribute_tensor(whole, mesh, target).to_local()), (source, target)
        assert torch.equal(y.detach().full_tensor(), whole)
        (y * distribute_tensor(weights, mesh, target)).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), weights)


def test_conversions_and_their_gradients() -> None:
    run_ranks(4, conversions, timeout=120)


def test_pending_to_flat_and_back() -> None:
    def run():
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        rank = torch.distributed.get_rank()
        local = torch.arange(15.0).view(5, 3) * (rank + 1)
        partial = DTensor.from_local(local, mesh, (Partial(), Replicate()))
        for units in [(4, 11), (0, 15)]:
            cut = partial.redistribute((RaggedShard((0, 1), units), Replicate()))
            wanted = torch.arange(15.0) * (4 if rank % 2 == 0 else 6)
            assert torch.equal(cut.to_local(), wanted[: units[0]] if rank < 2 else wanted[units[0] :])
            again = cut.redistribute((Partial(), Replicate())).redistribute((Replicate(), Replicate()))
            assert torch.equal(again.to_local().view(-1), wanted)

    run_ranks(4, run)


def test_from_local_needs_the_shape() -> None:
    def run():
        mesh = mesh_of(4, names=("dp",))
        units = (3, 0, 9, 3)
        rank = torch.distributed.get_rank()
        local = torch.arange(15.0).split(units)[rank].clone()
        x = DTensor.from_local(local, mesh, [RaggedShard((0, 1), units)], shape=(5, 3))
        assert torch.equal(x.full_tensor(), torch.arange(15.0).view(5, 3))
        DTensor.from_local(local, mesh, [RaggedShard((0, 1), units)])

    assert "shape=(...)" in raises_on_all(4, ShapeError, run)


def functions():
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    torch.manual_seed(1)
    whole, other = torch.randn(6, 4), torch.randn(6, 4)
    places = (RaggedShard((0, 1), (5, 7)), Shard(1))
    x, y = (distribute_tensor(t, mesh, places) for t in (whole, other))
    z = distribute_tensor(other, mesh, (Replicate(), Replicate()))

    def same(found, wanted, stays=True):
        assert (found.placements == places) is stays
        torch.testing.assert_close(found.full_tensor(), wanted, rtol=1e-6, atol=1e-6)

    same(x + y, whole + other)
    same(x * 2.0 + z, whole * 2.0 + other)
    same(z * x, whole * other)
    same(x.detach().exp().clone(), whole.exp())
    same(torch.zeros_like(x), torch.zeros_like(whole))
    same(torch.where(x > 0, x, y), torch.where(whole > 0, whole, other))
    same(x @ z.t(), whole @ other.t(), stays=False)
    same(x + torch.ones(4), whole + 1, stays=False)
    same(x.softmax(-1), whole.softmax(-1), stays=False)
    same(x.sum(0), whole.sum(0), stays=False)
    torch.testing.assert_close(x.norm().full_tensor(), whole.norm())
    torch.testing.assert_close(
        torch.stack(torch._foreach_norm([x, y])).norm().full_tensor(), torch.cat([whole, other]).norm()
    )
    w = x.clone()
    w.add_(z).mul_(0.5)
    w.addcmul_(y, y, value=0.1)
    torch._foreach_add_([w], [y], alpha=2.0)
    same(w, ((whole + other) * 0.5).addcmul_(other, other, value=0.1) + 2 * other)
    w.copy_(other)
    same(w, other)
    w.cumsum_(0)
    same(w, other.cumsum(0))
    torch.manual_seed(3)
    nn.init.normal_(w)
    torch.manual_seed(3)
    same(w, nn.init.normal_(torch.empty(6, 4)))
    x.requires_grad_()
    (nn.functional.linear(z, x) ** 2).sum().backward()
    plain = whole.clone().requires_grad_()
    (nn.functional.linear(other, plain) ** 2).sum().backward()
    same(x.grad, plain.grad)


def test_functions_on_flat_shards() -> None:
    run_ranks(4, functions, timeout=120)
