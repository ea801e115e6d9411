"""Losses over classes and elementwise losses against one device."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import FallbackWarning, InterleavedShard, Partial, RaggedShard, Replicate, Shard
from vescale_dtensor._oracle import compare, placements_for
from vescale_dtensor.testing import mesh_of, run_ranks

R = Replicate()


def _targets(shape, classes, seed=0, ignored=True):
    target = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))
    if ignored and target.numel() > 2:
        target.view(-1)[1::3] = -100
    return target


def _class_grid(mesh_sizes, shape, *, likely=False, kinds=(), targets=None, **options):
    """cross_entropy over every placement of the input; counts what its forward receives."""
    warnings.simplefilter("error", FallbackWarning)
    mesh, axes = mesh_of(*mesh_sizes), len(mesh_sizes)
    dim = min(len(shape) - 1, 1)
    batch = shape[:dim] + shape[dim + 1 :]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    if likely:
        target = torch.rand(shape, dtype=torch.float64).div(shape[dim]).requires_grad_()
    else:
        target = _targets(batch, shape[dim])
    samples = max(1, torch.Size(batch).numel())
    for x_at in placements_for(shape, axes, kinds=kinds):
        for target_at in targets or [None, (R,) * axes]:
            events = compare(lambda x, t: F.cross_entropy(x, t, **options), [x, target], [x_at, target_at], mesh)
            if Partial() not in x_at:
                most = max((event.received for event in events), default=0)
                assert most <= 8 * 3 * 4 * samples + 64, (x_at, most)
                assert len(events) <= 3 * axes, (x_at, events)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_on_two_axes(reduction):
    run_ranks(4, _class_grid, (2, 2), (5, 101), reduction=reduction)
    run_ranks(4, _class_grid, (2, 2), (3, 7, 2), reduction=reduction)
    run_ranks(4, _class_grid, (2, 2), (7,), reduction=reduction)


def test_cross_entropy_on_one_axis_with_fewer_classes_or_samples_than_ranks():
    run_ranks(4, _class_grid, (4,), (5, 101))
    run_ranks(4, _class_grid, (4,), (5, 3))
    run_ranks(4, _class_grid, (4,), (2, 9))
    run_ranks(4, _class_grid, (4,), (1, 2), reduction="none")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_weighted_and_smoothed(smoothing, weighted):
    weight = torch.rand(11, dtype=torch.float64) if weighted else None
    for reduction in ("mean", "none"):
        run_ranks(
            4, _class_grid, (2, 2), (5, 11), weight=weight, label_smoothing=smoothing, reduction=reduction
        )
        run_ranks(
            4, _class_grid, (2, 2), (5, 11), weight=weight, label_smoothing=smoothing, reduction=reduction, likely=True
        )


def test_cross_entropy_with_sharded_weight_and_targets():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        mesh = mesh_of(2, 2)
        x, target = torch.randn(5, 11, dtype=torch.float64, requires_grad=True), _targets((5,), 11)
        weight = torch.rand(11, dtype=torch.float64)
        everything = list(itertools.product(placements_for((5, 11), 2), placements_for((5,), 2)))
        for x_at, target_at in everything:
            compare(F.cross_entropy, [x, target], [x_at, target_at], mesh)
        for x_at, target_at in everything[::3]:
            for weight_at in placements_for((11,), 2):
                compare(
                    lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1),
                    [x, target, weight], [x_at, target_at, weight_at], mesh,
                )  # fmt: skip

    run_ranks(4, check)


def test_cross_entropy_of_ragged_and_interleaved_batches_and_classes():
    kinds = [InterleavedShard(0, 3), RaggedShard((0,), (1, 2)), InterleavedShard(1, 2)]
    targets = [None, (Shard(0), R), (InterleavedShard(0, 3), Shard(0)), (RaggedShard((0,), (1, 2)), R)]
    run_ranks(4, _class_grid, (2, 2), (12, 10), kinds=kinds, targets=targets)
