"""permute, squeeze, expand, repeat, their in-place twins, and new tensors of given sizes, on shards."""

from __future__ import annotations

import warnings
from math import prod

import pytest
import torch

from vescale_dtensor import (
    FallbackWarning,
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    ViewError,
    comm_trace,
    distribute_tensor,
)
from vescale_testkit import mesh_of, raises_on_all, run_ranks
from vescale_testkit.oracle import compare, placements_for

R, S, P = Replicate(), Shard, Partial()


def native():
    warnings.simplefilter("error", FallbackWarning)


def values(*shape):
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()


CASES = [
    ((3, 4, 2), lambda x: (x.permute(2, 0, 1), torch.permute(x, (2, 0, -2)), x.permute(dims=(0, 2, 1)))),
    ((3, 4, 2), lambda x: (x.transpose(-1, 0), torch.swapaxes(x, 1, 2), x.swapdims(1, 2))),
    ((3, 4, 2), lambda x: (torch.transpose(x, dim0=1, dim1=2), x.movedim(0, 2), torch.moveaxis(x, (0, 1), (-1, 0)))),
    ((3, 4, 2), lambda x: (torch.swapaxes(x, axis0=0, axis1=1), torch.swapdims(x, dim0=0, dim1=1))),
    ((3, 4), lambda x: (x.t(), x.T, x.H, x.mT, x.mH, x.adjoint())),
    ((3, 4), lambda x: (x.unsqueeze(0), x.unsqueeze(-1), torch.unsqueeze(x, dim=1))),
    ((1, 4, 1), lambda x: (x.squeeze(), x.squeeze(0), x.squeeze((0, 2)), x.squeeze(1), torch.squeeze(x, dim=-1))),
    ((2, 1, 4), lambda x: (x.squeeze(), x.squeeze(0), x.squeeze(1))),
    ((1, 4), lambda x: (x.expand(3, 4), x.expand(2, 3, -1), x.expand((3, -1)), torch.broadcast_to(x, (2, 4)))),
    ((1, 4, 1), lambda x: x.expand(3, -1, 5)),
    ((4, 5), lambda x: (x.repeat(1, 1), x.repeat(2, 3), x.repeat((2, 1, 3)), x.tile((2,)), torch.tile(x, (2, 1, 2)))),
    ((4, 5), lambda x: (x.repeat_interleave(3, 1), x.repeat_interleave(2, dim=0), torch.repeat_interleave(x, 2))),
    ((4,), lambda x: (torch.atleast_1d(x), torch.atleast_2d(x), torch.atleast_3d(x))),
    ((), lambda x: (torch.atleast_1d(x), torch.atleast_2d(x), torch.atleast_3d(x), x.squeeze(), x.T, x.expand(3))),
    ((4, 5), lambda x: torch.atleast_3d(x, x.unsqueeze(0))),
    ((4,), lambda x: torch.meshgrid(x, x * 2, indexing="xy")),
    ((4,), lambda x: torch.meshgrid([x, x * 2], indexing="ij")),
    ((4, 1), lambda x: torch.broadcast_tensors(x, torch.zeros(3))),
    ((4, 1), lambda x: (x.expand_as(torch.zeros(4, 3)), x.expand_as(x.expand(2, 4, 3)))),
]


@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_grid(sizes):
    def work():
        native()
        mesh = mesh_of(*sizes)
        for shape, function in CASES:
            for placements in placements_for(shape, len(sizes)):
                compare(function, [values(*shape)], [placements], mesh, bitwise=True)

    run_ranks(4, work)


PATTERNS = [
    ("heads", (2, 4, 8, 3), lambda x: x.transpose(1, 2), S(2), S(1)),
    ("weight", (8, 4), lambda x: x.T, S(0), S(1)),
    ("mask", (4, 6), lambda x: x.unsqueeze(1).expand(4, 3, 6), S(0), S(0)),
    ("last one kept", (4, 1), lambda x: x.squeeze(-1), S(0), S(0)),
    ("key-value heads", (2, 4, 3), lambda x: x.repeat_interleave(2, 1), S(1), S(1)),
    ("key-value heads, stretched", (2, 4, 3), lambda x: x.unsqueeze(2).expand(2, 4, 2, 3).reshape(2, 8, 3), S(1), S(1)),
    ("repeat", (4, 6), lambda x: x.repeat(3, 1), S(0), InterleavedShard(0, 3)),
    ("uneven repeat", (5, 6), lambda x: x.repeat(3, 1), S(0), InterleavedShard(0, 3)),
    ("partial", (4, 6), lambda x: x.repeat(2, 2), P, P),
    ("a grouped cut", (4, 12), lambda x: x.t(), InterleavedShard(1, 3), InterleavedShard(0, 3)),
]


def test_patterns_without_communication():
    def work():
        native()
        mesh = mesh_of(4)
        for name, shape, function, before, after in PATTERNS:
            assert compare(function, [values(*shape)], [[before]], mesh, bitwise=True) == [], name
            out = function(distribute_tensor(values(*shape), mesh, [before]))
            assert list(out.placements) == [after], f"{name}: {out.placements}"

    run_ranks(4, work)


def test_repeats_are_copies():
    """Also those of which a reshape would be a view: of a dim of size 1, or once."""

    def work():
        native()
        mesh = mesh_of(4)
        x = distribute_tensor(values(1, 4).detach(), mesh, [R])
        for out in (x.repeat(3, 1), x.repeat(1, 1), x.tile(2, 1), x.repeat_interleave(1, 1), x.repeat_interleave(2, 0)):
            out.add_(1)
        assert x.full_tensor().equal(values(1, 4).detach())

    run_ranks(4, work)


INPLACE = [
    ((3, 4, 2), lambda x: x.transpose_(0, 2)),
    ((3, 4, 2), lambda x: x.swapaxes_(1, 2)),
    ((3, 4, 2), lambda x: x.swapdims_(1, 0)),
    ((4, 4), lambda x: x.t_()),
    ((3, 4), lambda x: x.unsqueeze_(1)),
    ((3, 1, 4), lambda x: x.squeeze_()),
    ((3, 1, 4), lambda x: x.squeeze_(1)),
]


def test_in_place_gives_self_the_new_layout():
    def work():
        native()
        mesh = mesh_of(2, 2)
        for shape, function in INPLACE:

            def both(x, function=function):
                x = x * 1.0
                y = function(x)
                assert y is x
                return x * torch.arange(prod(x.shape), dtype=x.dtype).reshape(x.shape)

            for placements in placements_for(shape, 2):
                if 1 not in shape or not any(p == S(1) for p in placements):
                    compare(both, [values(*shape)], [placements], mesh)
                    with torch.no_grad():
                        compare(both, [values(*shape).detach()], [placements], mesh)

    run_ranks(4, work)


def test_in_place_forgets_conversions():
    """A square matrix has the same shape after t_(): what was remembered of it is no longer its value."""

    def work():
        mesh = mesh_of(4)
        from vescale_dtensor._conversions.memo import close_scope, open_scope

        x = distribute_tensor(values(4, 4).detach(), mesh, [S(0)])
        open_scope()
        before = x.redistribute([R])
        x.t_()
        after = x.redistribute([R])
        close_scope()
        assert after.to_local().equal(before.to_local().t())

    run_ranks(4, work)


def test_squeeze_in_place_of_a_cut_dim_raises():
    def work():
        distribute_tensor(values(1, 8).detach(), mesh_of(4), [S(0)]).squeeze_(0)

    assert "tensor.squeeze(...)" in raises_on_all(4, ViewError, work)


def test_new_tensors_have_global_sizes():
    def work():
        native()
        mesh = mesh_of(2, 2)
        functions = [
            lambda x: (x.new_zeros(5, 2), x.new_zeros((5,)), x.new_ones(size=(2, 3)), x.new_empty(3).shape),
            lambda x: (x.new_full((3, 2), 7.0), x.new_tensor([[1.0, 2.0]]), x.new_zeros(()), x.new_tensor(3)),
            lambda x: x.new_zeros(4, 6).copy_(x) + x,
            lambda x: x + x.new_ones(4, 1, dtype=torch.float32),
        ]
        for function in functions:
            for placements in placements_for((4, 6), 2):
                compare(function, [values(4, 6).detach()], [placements], mesh)

    run_ranks(4, work)


def joined(x):
    """Two parts written beside each other into memory that was asked of the first, as DeepSeek makes its keys."""
    room = x.new_empty(*x.shape[:-1], x.shape[-1] + 2)
    room[..., :-2].copy_(x)
    room[..., -2:].copy_(x[..., :2])
    return room * 2


def test_memory_that_is_filled_with_parts_of_a_tensor_is_cut_as_it_and_nothing_is_gathered():
    def work():
        mesh = mesh_of(2, 2)
        for placements in placements_for((4, 6), 2):
            compare(joined, [values(4, 6)], [placements], mesh)
        whole = distribute_tensor(values(5, 3, 4).detach(), mesh, [S(0), S(1)]).requires_grad_()
        with comm_trace() as trace:
            out = joined(whole)
            out.sum().backward()
        assert out.placements == (S(0), S(1)) and not trace.count(direction="forward"), trace
        assert whole.new_empty(5, 7).placements == (S(0), R)  # as large along the first dim alone
        assert whole.new_empty((7, 3, 4)).placements == (R, R)

    run_ranks(4, work)


@pytest.mark.parametrize("view", [lambda w: w[0], lambda w: w.t(), lambda w: w.view(-1)[3:9], lambda w: w.detach()])
@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_a_view_without_gradients_sees_a_write_to_its_parameter(view, place):
    """Both under no_grad, as on one device: torch minds only where gradients are recorded."""

    def check():
        weight = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
        placed = torch.nn.Parameter(distribute_tensor(weight.detach().clone(), mesh_of(2), [place]))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            try:
                seen = view(placed)
                placed.mul_(2).add_(1)
            except ViewError:
                return True  # the view is a copy
            expected = view(weight)
            weight.mul_(2).add_(1)
            return torch.equal((seen * 1).full_tensor(), expected) and seen.sum().item() == expected.sum().item()

    assert all(run_ranks(2, check))
