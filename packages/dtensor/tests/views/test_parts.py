"""One weight's features that are parts of several sizes, each cut alike, read part by part: by slices, by narrow, by a
split. Each part keeps the cut that it had by itself, and nothing is sent."""

import itertools
from functools import partial
from math import prod

import pytest
import torch

from vescale_dtensor import InterleavedShard, Replicate, Shard, comm_trace, distribute_tensor
from vescale_testkit import mesh_of, run_ranks
from vescale_testkit.oracle import compare

R = Replicate()
PARTS = [(4, 2, 2), (6, 3, 3), (1, 1), (8, 1, 1, 2), (2, 2, 2), (1, 3)]
"""Each of so many units per rank."""


def cut_alike(parts, ranks, dim):
    """The placement in which every rank has its part of each."""
    return InterleavedShard(dim, 1, [rank for part in parts for rank in range(ranks) for _ in range(part)])


def borders(parts, unit):
    """(start, stop) of each part."""
    stops = [unit * sum(parts[: at + 1]) for at in range(len(parts))]
    return list(zip([0, *stops], stops))


def sliced(x, spans):
    return tuple(x[..., start:stop] for start, stop in spans)


def narrowed(x, spans):
    return tuple(x.narrow(-1, start, stop - start) for start, stop in spans)


def parted(x, spans):
    return x.split([stop - start for start, stop in spans], -1)


def among_others(x, spans):
    """A slice among a new dim, an index and a slice of dims that nobody cuts."""
    return tuple(x[None, 1, :, 1:, start:stop] for start, stop in spans)


def nothing_is_sent(shape, ranks) -> None:
    """Every way to read parts of several sizes that an axis of so many ranks cuts."""
    torch.manual_seed(0)
    mesh = mesh_of(*shape)
    for parts, unit, read in itertools.product(PARTS, (1, 3), (sliced, narrowed, parted, among_others)):
        x = torch.randn(2, 5, 4, ranks * unit * sum(parts), dtype=torch.double).requires_grad_()
        cut, spans = cut_alike(parts, ranks, 3), borders(parts, ranks * unit)
        for placed in [(cut,)] if mesh.ndim == 1 else [(R, cut), (cut, R), (Shard(1), cut)]:
            assert compare(partial(read, spans=spans), [x], [placed], mesh) == [], (placed, read, spans)
            for one in read(distribute_tensor(x.detach(), mesh, placed), spans):
                assert one.placements == tuple(Shard(3) if p is cut else p for p in placed)


@pytest.mark.parametrize("shape, ranks", [((2,), 2), ((2, 2), 2), ((4,), 4)])
def test_nothing_is_sent_and_every_part_has_a_plain_cut(shape, ranks):
    run_ranks(prod(shape), nothing_is_sent, shape, ranks, timeout=120)


def groups() -> None:
    x = torch.randn(3, 24, dtype=torch.double).requires_grad_()
    cut = InterleavedShard(1, 4)
    for start, stop, kept in ((0, 6, Shard(1)), (6, 18, InterleavedShard(1, 2)), (6, 24, InterleavedShard(1, 3))):
        assert compare(lambda x, a=start, b=stop: x[:, a:b], [x], [(cut,)], mesh_of(2)) == []
        assert distribute_tensor(x.detach(), mesh_of(2), [cut])[:, start:stop].placements == (kept,)


def test_slices_of_whole_groups_keep_them():
    run_ranks(2, groups)


STEPS = [(Shard(3), 24), (InterleavedShard(3, 3), 48), (cut_alike((4, 2, 2), 2, 3), 64)]


def every_other(shape) -> None:
    """Every second and every fourth feature, of those that each rank has in runs of multiples of these: gate and up
    that take turns, pairs that are turned."""
    torch.manual_seed(0)
    mesh = mesh_of(*shape)
    for (cut, size), step in itertools.product(STEPS, (2, 4)):
        x = torch.randn(2, 5, 4, size, dtype=torch.double).requires_grad_()
        for placed in [(cut,)] if mesh.ndim == 1 else [(R, cut), (cut, R), (Shard(1), cut)]:
            for start in range(step):
                at = slice(start, None, step)
                assert compare(lambda x, at=at: x[..., at], [x], [placed], mesh) == [], (placed, at)
                whole = x.detach().clone()
                d = distribute_tensor(whole, mesh, placed)
                with comm_trace() as trace:
                    assert d[:, :, 1:, at].placements == tuple(placed)
                    d[..., at].mul_(2)  # a view, as on one device
                whole[..., at].mul_(2)
                assert len(trace) == 0 and torch.equal(d.full_tensor(), whole)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_every_other_index_keeps_the_cut(shape):
    run_ranks(prod(shape), every_other, shape, timeout=120)


def others() -> None:
    """What begins or ends within a chunk, has another step, or leaves a rank without any, is right, and has no part's
    cut."""
    cut = InterleavedShard(1, 1, (0, 0, 1, 1, 0, 1))
    x = torch.randn(3, 24, dtype=torch.double).requires_grad_()
    steps = slice(0, 24, 3), slice(2, 24, 2), slice(0, 22, 2)
    for at in (slice(1, 16), slice(0, 14), slice(0, 8), *steps, slice(4, 4), 5):
        compare(lambda x, at=at: x[:, at] * 1, [x], [(cut,)], mesh_of(2))


def test_other_slices_are_right():
    run_ranks(2, others)


def written() -> None:
    parts, mesh = (4, 2, 2), mesh_of(2)
    whole = torch.randn(3, 16)
    cut = distribute_tensor(whole.clone(), mesh, [cut_alike(parts, 2, 1)])
    with comm_trace() as trace:
        cut[:, 8:12].add_(1.0)
        cut[:, 12:].zero_()
    assert not len(trace), str(trace)
    whole[:, 8:12].add_(1.0)
    whole[:, 12:].zero_()
    assert torch.equal(cut.full_tensor(), whole)


def test_a_part_is_a_view():
    run_ranks(2, written)


def uneven(ranks) -> None:
    x = torch.randn(3, 14, dtype=torch.double).requires_grad_()  # two groups of 7
    for at in (slice(0, 7), slice(7, 14)):
        assert compare(lambda x, at=at: x[:, at], [x], [(InterleavedShard(1, 2),)], mesh_of(ranks)) == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_of_groups_that_ranks_do_not_divide(ranks):
    run_ranks(ranks, uneven, ranks)
