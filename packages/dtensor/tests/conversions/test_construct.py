"""Making DTensors, moving them, and what the replicated placement means."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import vescale_dtensor as vd
from vescale_dtensor import (
    DTensor,
    InterleavedShard,
    Partial,
    PlainTensorError,
    RaggedShard,
    Replicate,
    Shard,
    comm_trace,
    distribute_tensor,
)
from vescale_dtensor._layouts.state import INVARIANT, PARTIAL, REPLICATE
from vescale_testkit import mesh_of, raises_on_all, run_ranks

R, P = Replicate(), Partial()
PLACEMENTS = [R, P, Shard(0), Shard(1), Shard(-1), InterleavedShard(0, 2), RaggedShard((0,), (1, 2))]


def grid():
    return mesh_of(2, 2, names=("dp", "tp"))


def numbers(*shape) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1


# --- distribute_tensor --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 5), (6, 3)], ids=str)
def test_distribute_with_every_placement(shape) -> None:
    def run() -> None:
        full = numbers(*shape)
        for places in itertools.product(PLACEMENTS, repeat=2):
            try:
                with comm_trace() as trace:
                    d = distribute_tensor(full, grid(), places)
            except vd.PlacementError:
                assert shape == (6, 3) or any(isinstance(p, (InterleavedShard, RaggedShard)) for p in places)
                continue
            assert not trace.events, "nothing is sent"
            assert d.shape == full.shape and d.is_leaf and d.dtype is full.dtype
            assert tuple(d.to_local().shape) == d.mesh_layout.local_shape
            assert torch.equal(d.full_tensor(), full), places
            assert d.to_local().is_contiguous()
            assert d.to_local().untyped_storage().nbytes() == d.to_local().nbytes, "the whole tensor is not kept alive"

    run_ranks(4, run)


def test_a_partial_axis_holds_the_value_on_its_first_rank() -> None:
    def run() -> list:
        return distribute_tensor(torch.ones(1), grid(), [P, P]).to_local().tolist()

    assert run_ranks(4, run) == [[1.0], [0.0], [0.0], [0.0]]


def test_a_leaf_stays_a_leaf_and_shares_nothing_with_the_source() -> None:
    def run() -> None:
        full = numbers(4, 6).requires_grad_()
        for places in [(R, R), (Shard(0), R), (P, R)]:
            d = distribute_tensor(full, grid(), places)
            assert d.is_leaf and d.requires_grad
            d.sum().backward()
            assert full.grad is None and d.grad.shape == (4, 6)
            with torch.no_grad():
                d.zero_()
        assert full.detach().abs().sum() > 0
        computed = distribute_tensor(full.sin(), grid(), (R, R))
        assert computed.is_leaf and computed.requires_grad
        assert type(torch.nn.Parameter(d)) is DTensor and isinstance(torch.nn.Parameter(d), torch.nn.Parameter)
        assert not distribute_tensor(torch.ones(3, dtype=torch.int64), grid(), (R, Shard(0))).requires_grad

    run_ranks(4, run)


def test_empty_and_scalar_tensors() -> None:
    def run() -> None:
        for full in (torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(1, 1), torch.tensor(3.0)):
            for places in itertools.product([R, P, *[Shard(d) for d in range(full.ndim)]], repeat=2):
                d = distribute_tensor(full, grid(), places)
                assert torch.equal(d.full_tensor(), full)
                assert torch.equal((d + 1).full_tensor(), full + 1)

    run_ranks(4, run)


# --- from_local -----------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False], ids=["shape given", "shapes exchanged"])
def test_from_local_is_the_inverse_of_to_local(given) -> None:
    def run() -> None:
        for shape in [(12, 5), (5, 3), (3, 2), (0, 4)]:
            full = numbers(*shape)
            for places in itertools.product(PLACEMENTS, repeat=2):
                try:
                    d = distribute_tensor(full, grid(), places)
                except vd.PlacementError:
                    continue
                with comm_trace() as trace:
                    again = DTensor.from_local(d.to_local(), grid(), places, shape=shape if given else None)
                assert not trace.events
                assert again.mesh_layout is d.mesh_layout, places
                assert again.to_local().data_ptr() == d.to_local().data_ptr(), "no copy"
                assert torch.equal(again.full_tensor(), full)

    run_ranks(4, run)


def test_a_plain_leaf_is_whole_and_what_from_local_makes_of_it_is_a_part() -> None:
    def run() -> None:
        mesh = grid()
        x = distribute_tensor(numbers(4, 6), mesh, [Shard(0), R])
        plain = numbers(2, 6).requires_grad_()
        (numbers(4, 6) @ plain.t()).square().sum().backward()
        adapter = numbers(2, 6).requires_grad_()
        (x @ adapter.t()).square().sum().backward()
        torch.testing.assert_close(adapter.grad, plain.grad)
        whole = distribute_tensor(adapter, mesh, [R, R])
        (x @ whole.t()).square().sum().backward()
        torch.testing.assert_close(whole.grad.full_tensor(), plain.grad)
        adapter.grad = None
        part = DTensor.from_local(adapter.t(), mesh, [R, R])
        (x @ part).square().sum().backward()
        parts = adapter.grad.clone()
        dist.all_reduce(parts)
        torch.testing.assert_close(parts, plain.grad)  # each rank's contribution, which nobody has added up
        with pytest.raises(PlainTensorError) as caught:
            x @ (part.to_local() * 2)
        assert "DTensor.from_local(tensor, mesh, placements)" in str(caught.value)

    run_ranks(4, run)


def test_from_local_and_to_local_are_differentiable() -> None:
    def run() -> None:
        mesh = grid()
        local = torch.ones(2, 3, requires_grad=True)
        d = DTensor.from_local(local * 2, mesh, [Shard(0), Shard(1)], shape=(4, 6))
        (d * d).sum().backward()
        torch.testing.assert_close(local.grad, torch.full((2, 3), 8.0))
        x = distribute_tensor(numbers(4, 6), mesh, [Shard(0), R]).requires_grad_()
        (x.to_local() * (1 + mesh.get_coordinate()[1])).sum().backward()  # ranks of tp do different work
        torch.testing.assert_close(x.grad.full_tensor(), torch.full((4, 6), 3.0))

    run_ranks(4, run)


def test_from_local_takes_strides_for_torchs_sake() -> None:
    def run() -> None:
        d = DTensor.from_local(torch.ones(2, 6), grid(), [Shard(0), R], shape=torch.Size([4, 6]), stride=(6, 1))
        assert d.shape == (4, 6)

    run_ranks(4, run)


def test_a_wrong_local_shape_raises_on_all_ranks_though_one_alone_is_wrong() -> None:
    def made(rank_with_two: int) -> str:
        rows = 2 if torch.distributed.get_rank() == rank_with_two else 3
        return repr(DTensor.from_local(torch.zeros(rows, 2), mesh_of(4, names=("tp",)), [Shard(0)]).mesh_layout)

    assert run_ranks(4, made, 3)[0].startswith("[11, 2] S(0)")  # as torch.chunk cuts 11
    raises_on_all(4, vd.ShapeError, made, 0, match="torch.chunk")


# --- redistribute -----------------------------------------------------------------------------


def test_replicate_keeps_its_state_or_is_the_one_whose_backward_is_cheap() -> None:
    def run() -> None:
        full = numbers(4, 6)

        def states(*places):
            return distribute_tensor(full, grid(), places).redistribute([R, R]).mesh_layout.states

        assert states(P, Shard(0)) == (INVARIANT, REPLICATE)
        assert states(R, P) == (REPLICATE, INVARIANT)
        once = distribute_tensor(full, grid(), [P, R]).redistribute([R, R])
        assert once.redistribute([R, R]) is once
        assert once.redistribute([Shard(0), P]).mesh_layout.states[1] is PARTIAL

    run_ranks(4, run)


def test_redistribute_takes_one_placement_for_a_mesh_of_one_axis() -> None:
    def run() -> None:
        mesh = mesh_of(4, names=("tp",))
        d = distribute_tensor(numbers(8), mesh, Shard(0))
        assert d.redistribute(R).placements == (R,)
        assert vd.redistribute(d, [Shard(0)]) is d

    run_ranks(4, run)


# --- factories ----------------------------------------------------------------------------------


def test_factories_make_what_torch_makes() -> None:
    def run() -> None:
        for places in [(Shard(0), R), (R, R), (P, Shard(1)), (Shard(0), Shard(0))]:
            on = {"device_mesh": grid(), "placements": places}
            for made, want in [
                (vd.zeros(5, 3, **on), torch.zeros(5, 3)),
                (vd.zeros((5, 3), **on), torch.zeros(5, 3)),
                (vd.ones([5, 3], dtype=torch.int32, **on), torch.ones(5, 3, dtype=torch.int32)),
                (vd.full((5, 3), 2, **on), torch.full((5, 3), 2)),
                (vd.full((5, 3), 2.5, dtype=torch.float64, **on), torch.full((5, 3), 2.5, dtype=torch.float64)),
                (vd.full((5, 3), fill_value=True, **on), torch.full((5, 3), True)),
            ]:
                assert made.dtype is want.dtype and torch.equal(made.full_tensor(), want), places
            assert vd.empty(5, 3, **on).shape == (5, 3)
            assert vd.ones(5, 3, requires_grad=True, **on).requires_grad
            torch.manual_seed(3)
            drawn = vd.randn(5, 3, **on), vd.rand((5, 3), dtype=torch.float64, **on)
            torch.manual_seed(3)
            for d, want in zip(drawn, (torch.randn(5, 3), torch.rand((5, 3), dtype=torch.float64))):
                assert torch.equal(d.full_tensor(), want)
        on = {"device_mesh": grid(), "placements": (R, Shard(0))}
        assert torch.equal(vd.arange(7, **on).full_tensor(), torch.arange(7))
        assert torch.equal(vd.arange(1, 8, 2.5, **on).full_tensor(), torch.arange(1, 8, 2.5))
        assert vd.rand(4, requires_grad=True, **on).requires_grad

    run_ranks(4, run)


def test_factories_allocate_the_shard_alone() -> None:
    def run() -> int:
        mesh = mesh_of(4, names=("tp",))
        return vd.zeros(1 << 20, 4, device_mesh=mesh, placements=[Shard(0)]).to_local().untyped_storage().nbytes()

    assert run_ranks(4, run) == [(1 << 20) * 4] * 4
