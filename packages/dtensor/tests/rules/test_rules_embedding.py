"""Embedding rules against one device."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import FallbackWarning, InterleavedShard, Partial, Replicate, Shard
from vescale_testkit import mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for, spread


def _grid(mesh_sizes, rows, ids_shape, function=F.embedding, kinds=()):
    warnings.simplefilter("error", FallbackWarning)
    mesh = mesh_of(*mesh_sizes)
    axes = len(mesh_sizes)
    ids = torch.randint(0, rows, ids_shape)
    weight = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    for weight_at in placements_for(weight.shape, axes, kinds=kinds):
        for ids_at in [None, *placements_for(ids_shape, axes, partial=False)]:
            events = compare(lambda i, w: function(i, w), [ids, weight], [ids_at, weight_at], mesh)
            if ids_at is None or all(a == Replicate() or b == Replicate() for a, b in zip(ids_at, weight_at)):
                assert not events, (ids_at, weight_at, events)
            elif Partial() not in ids_at:  # sharded by the same axis: the cheaper of the two moves, ids or table
                assert sum(e.received for e in events) <= 2 * axes * min(ids.nbytes, weight.nbytes), events


def test_rows_columns_and_ids_on_two_axes():
    run_ranks(4, _grid, (2, 2), 11, (5, 3))


def test_on_one_axis_with_fewer_rows_than_ranks():
    run_ranks(4, _grid, (4,), 101, (5,))
    run_ranks(4, _grid, (4,), 3, (2, 3))


def test_interleaved_rows():
    run_ranks(4, _grid, (2, 2), 12, (5,), kinds=[InterleavedShard(0, 3)])


def test_pending_ids_are_reduced():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        mesh = mesh_of(2, 2)
        ids, weight = torch.randint(0, 11, (5, 3)), torch.randn(11, 6, requires_grad=True)
        for ids_at in placements_for(ids.shape, 2):
            compare(F.embedding, [ids, weight], [ids_at, (Replicate(), Shard(0))], mesh)

    run_ranks(4, check)


@pytest.mark.parametrize("padding_idx", [0, 4, 10, -1, -7])
def test_padding_row_gets_no_gradient(padding_idx):
    run_ranks(4, _grid, (2, 2), 11, (7,), function=lambda i, w: F.embedding(i, w, padding_idx))


def test_spellings():
    module = torch.nn.Embedding(11, 6, padding_idx=2)
    for function in (
        lambda i, w: F.embedding(input=i, weight=w),
        lambda i, w: torch.embedding(w, i, 2),
        lambda i, w: torch.embedding(w, i),
        lambda i, w: torch.func.functional_call(module, {"weight": w}, (i,)),
    ):
        run_ranks(4, _grid, (4,), 11, (7,), function=function)


def test_gradient_scaled_by_frequency_sees_all_ids():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        mesh = mesh_of(2, 2)
        ids, weight = torch.randint(0, 4, (9,)), torch.randn(11, 6, requires_grad=True)
        for weight_at in placements_for(weight.shape, 2):
            for ids_at in placements_for(ids.shape, 2, partial=False):
                compare(
                    lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), [ids, weight], [ids_at, weight_at], mesh
                )

    run_ranks(4, check)


def test_max_norm_scales_the_rows_looked_up():
    def check():
        mesh = mesh_of(2, 2)
        warnings.simplefilter("error", FallbackWarning)
        ids, weight = torch.tensor([1, 5, 5, 10]), 3 * torch.randn(11, 6)
        for weight_at in placements_for(weight.shape, 2, partial=False):
            expected = weight.clone()
            wanted = F.embedding(ids, expected, max_norm=1.5, norm_type=1.0)
            table = spread(weight, mesh, weight_at)
            found = F.embedding(ids, table, max_norm=1.5, norm_type=1.0)
            torch.testing.assert_close(table.full_tensor(), expected)
            torch.testing.assert_close(found.full_tensor(), wanted)
            for ids_at in (None, (Shard(0), Replicate())):
                leaf = weight.clone().requires_grad_()
                compare(lambda i, w: F.embedding(i, w, max_norm=1.5), [ids, leaf], [ids_at, weight_at], mesh)

    run_ranks(4, check)


def test_out_of_range_and_sparse_are_errors():
    def check():
        from vescale_dtensor._errors import OperatorError

        mesh = mesh_of(4)
        weight = spread(torch.randn(11, 6), mesh, (Shard(0),))
        for wrong in (11, -1):
            with pytest.raises(IndexError, match="index out of range"):
                F.embedding(torch.tensor([0, wrong]), weight)
        with pytest.raises(OperatorError, match="sparse"):
            F.embedding(torch.tensor([0]), weight, sparse=True)

    run_ranks(4, check)


def test_embedding_bag_falls_back():
    def check():
        warnings.simplefilter("ignore", FallbackWarning)
        mesh = mesh_of(2, 2)
        ids, weight = torch.randint(0, 11, (4, 3)), torch.randn(11, 6, requires_grad=True)
        for weight_at in placements_for(weight.shape, 2):
            compare(lambda i, w: F.embedding_bag(i, w, mode="sum"), [ids, weight], [None, weight_at], mesh)

    run_ranks(4, check)
