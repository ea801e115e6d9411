"""Regions: the places of a sequence that each shard holds, against index tensors. No processes."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_dtensor._layouts.state import INVARIANT, sharded
from vescale_rng._region import Region, boxes
from vescale_testkit.oracle import ImaginedMesh, imagined_layout, shard_of


def filled(region, chunk):
    """The shard's places in the sequence, put together from pieces of intervals of `chunk` places."""
    found = torch.full(region.shape, -1)
    strides = region.strides
    for start in range(0, region.numel, chunk):
        for piece in region.pieces(start, min(start + chunk, region.numel)):
            target = found
            for dim, (at, size) in enumerate(zip(piece.corner, piece.shape)):
                target = target.narrow(dim, at, size)
            target.copy_(torch.arange(region.numel).as_strided(piece.shape, strides, piece.start))
    return found


STATES = [INVARIANT, sharded(0), sharded(1), sharded(0, 2), sharded(1, 3), sharded(0, 1, (1, 0)), sharded(1, 1, (2, 1))]


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.integers(0, 7)] * 3),
    st.tuples(*[st.sampled_from(STATES)] * 2),
    st.integers(1, 40),
    st.permutations(range(3)),
)
def test_pieces_are_the_shard(shape, states, chunk, order):
    mesh = ImaginedMesh(2, 2)
    layout = imagined_layout(mesh, states, shape)
    if layout is None:
        return
    whole = torch.arange(torch.Size(shape).numel()).view([shape[dim] for dim in order])
    for coordinate in mesh.coordinates:
        ranges = layout.region_at(coordinate)
        region = Region(tuple(shape[dim] for dim in order), tuple(ranges[dim] for dim in order))
        undo = [order.index(dim) for dim in range(3)]
        wanted = shard_of(whole.permute(undo), layout, coordinate).permute(order)
        assert torch.equal(filled(region, chunk), wanted)
        joined = region.joined()
        assert torch.equal(filled(joined, chunk).view(region.shape), wanted)


@pytest.mark.parametrize("sizes", [(), (5,), (3, 4), (2, 3, 4)])
def test_boxes_are_the_interval(sizes):
    numel = torch.Size(sizes).numel()
    index = torch.arange(numel).view(sizes)
    for start, stop in itertools.combinations(range(numel + 1), 2):
        found = [index[tuple(slice(*span) for span in box)].flatten() for box in boxes(sizes, start, stop)]
        assert torch.cat(found).tolist() == list(range(start, stop))
        assert len(found) <= 2 * len(sizes) + 1


def test_joined_leaves_the_dims_that_are_cut():
    assert Region((4, 3, 2), (((0, 2),), ((0, 3),), ((0, 2),))).joined() == Region((24,), (((0, 12),),))
    assert Region((4, 3, 2), (((0, 4),), ((0, 1),), ((0, 2),))).joined() == Region((4, 6), (((0, 4),), ((0, 2),)))
