"""Pieces of unequal length that are joined along their cut dim, passed through what treats channels one by one, and
parted again: queries, keys and values of other head counts. Nothing is sent."""

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import DTensor, InterleavedShard, Replicate, Shard, comm_trace, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

SIZES = (8, 8, 16)


def through(parts, weight):
    """As linear attention does: joined, convolved along positions channel by channel, parted."""
    joined = torch.cat(parts, -1).transpose(1, 2)
    mixed = F.silu(F.conv1d(F.pad(joined, (2, 0)), weight, groups=weight.shape[0]))
    query, key, value = mixed.transpose(1, 2).split([part.shape[-1] for part in parts], -1)
    heads = [one.reshape(*one.shape[:2], -1, 4) for one in (query, key, value)]
    heads[:2] = [one.repeat_interleave(heads[2].shape[2] // one.shape[2], 2) for one in heads[:2]]
    return (heads[0] * heads[1] + heads[2]).square().sum()


def whole(sizes):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 5, size, generator=generator, dtype=torch.double) for size in sizes]
    return parts, torch.randn(sum(sizes), 1, 3, generator=generator, dtype=torch.double)


def both(sizes, placement, sent) -> None:
    mesh = mesh_of(2, names=("tp",))
    parts, weight = whole(sizes)
    leaves = [one.requires_grad_() for one in (*parts, weight)]
    wanted = through(leaves[:-1], leaves[-1])
    wanted.backward()
    cut = [distribute_tensor(one.detach(), mesh, [placement]).requires_grad_() for one in parts]
    cut.append(distribute_tensor(weight.detach(), mesh, [Replicate()]).requires_grad_())
    with comm_trace() as trace:
        found = through(cut[:-1], cut[-1])
        forward = len(trace)
        found.backward()
    assert forward == sent, str(trace)
    torch.testing.assert_close(found.full_tensor(), wanted)
    for one, other in zip(cut, leaves):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.parametrize("sizes", [SIZES, (8, 8, 8), (16, 16, 48)])
def test_nothing_is_sent(sizes):
    run_ranks(2, both, sizes, Shard(2), 0)


def pieces(sizes, borders) -> list:
    mesh = mesh_of(2, names=("tp",))
    parts, _ = whole(sizes)
    joined = torch.cat([distribute_tensor(one, mesh, [Shard(2)]) for one in parts], 2)
    torch.testing.assert_close(joined.full_tensor(), torch.cat(parts, 2))
    found = joined.split(borders, 2)
    for one, other in zip(found, torch.cat(parts, 2).split(borders, 2)):
        torch.testing.assert_close(one.full_tensor(), other)
    assert isinstance(joined, DTensor)
    return [one.placements[0] for one in (joined, *found)]


def test_pieces_have_the_simplest_cut():
    joined, *found = run_ranks(2, pieces, SIZES, [8, 8, 16])[0]
    assert joined == InterleavedShard(2, 1, (0, 1, 0, 1, 0, 0, 1, 1))
    assert found == [Shard(2)] * 3
    assert run_ranks(2, pieces, SIZES, [16, 16])[0][1:] == [InterleavedShard(2, 2), Shard(2)]
    assert run_ranks(2, pieces, SIZES, [20, 12])[0][1:] == [
        InterleavedShard(2, 1, (0, 1, 0, 1, 0)),
        InterleavedShard(2, 1, (0, 1, 1)),
    ]


def test_a_piece_that_would_leave_a_rank_without_any_moves():
    run_ranks(2, pieces, SIZES, [4, 28])


def test_what_ends_within_a_chunk_moves():
    run_ranks(2, pieces, SIZES, [7, 25])
