"""Flat ragged layouts: their geometry. Oracle: indices of the global tensor. Pure: no ranks, no processes."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch

from vescale_dtensor import InterleavedShard, Partial, PlacementError, RaggedShard, Replicate, Shard
from vescale_dtensor._layouts.layout import canonical_states, layout_of
from vescale_dtensor._layouts.mesh import Mesh
from vescale_dtensor._layouts.state import flat

GRID = Mesh((2, 3), ("dp", "tp"))
OTHERS = [Replicate(), Shard(0), Shard(1), InterleavedShard(0, 2), InterleavedShard(1, 2)]
SHAPES = [(8, 6), (5, 7), (4, 2, 6), (1, 12), (12,), (3, 0)]


def layout(placements, shape, mesh=GRID):
    return layout_of(mesh, canonical_states("test", placements, mesh, shape), shape)


def coordinates(mesh):
    return list(itertools.product(*map(range, mesh.sizes)))


def largest_shard(shape, other):
    opened = layout((Replicate(), other), shape)
    return max(prod(opened.shape_at(c)) for c in coordinates(GRID))


def taken(tensor, regions):
    for dim, ranges in enumerate(regions):
        index = [i for start, stop in ranges for i in range(start, stop)]
        tensor = tensor.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return tensor


def fitting(shape, other):
    """The placement, or a skip where it does not fit the shape."""
    dim = getattr(other, "dim", 0)
    if dim >= len(shape) or shape[dim] % getattr(other, "groups", 1):
        pytest.skip("does not fit")
    return other


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
def test_boxes_are_the_elements_in_the_order_of_memory(shape, other, share) -> None:
    other, largest = fitting(shape, other), largest_shard(shape, other)
    first = int(largest * share)
    it = layout((RaggedShard(tuple(range(len(shape))), (first, largest - first)), other), shape)
    numbered = torch.arange(prod(shape)).view(shape)
    opened = layout((Replicate(), other), shape)
    seen = []
    for coordinate in coordinates(GRID):
        shard = taken(numbered, opened.region_at(coordinate)).reshape(-1)
        wanted = shard[:first] if coordinate[0] == 0 else shard[first:]
        found, at = [], 0
        for box, offset in it.boxes_at(coordinate):
            part = numbered[tuple(slice(*span) for span in box)].reshape(-1)
            assert offset == at and part.numel()
            at += part.numel()
            found.append(part)
        assert torch.equal(torch.cat([numbered.new_empty(0), *found]), wanted)
        assert it.shape_at(coordinate) == (wanted.numel(),)
        if not isinstance(other, InterleavedShard):
            assert len(found) <= 2 * len(shape) - 1
        seen.append(wanted)
    replicas = 1 if isinstance(other, (Shard, InterleavedShard)) else 3
    assert torch.equal(torch.cat(seen).sort()[0], numbered.reshape(-1).repeat_interleave(replicas))


@pytest.mark.parametrize(
    "placements", [(Shard(0), Shard(0)), (Shard(1), InterleavedShard(0, 2)), (Partial(), Shard(1))]
)
def test_boxes_of_layouts_that_are_not_flat(placements) -> None:
    it, numbered = layout(placements, (8, 6)), torch.arange(48).view(8, 6)
    for coordinate in coordinates(GRID):
        found = [numbered[tuple(slice(*s) for s in box)].reshape(-1) for box, _ in it.boxes_at(coordinate)]
        assert torch.equal(
            torch.cat([numbered.new_empty(0), *found]), taken(numbered, it.region_at(coordinate)).reshape(-1)
        )


def test_the_flat_cut_comes_last_whatever_its_axis() -> None:
    it = layout((RaggedShard((0, 1), (5, 4)), Shard(0)), (7, 3))  # tp cuts 3, 3 and 1 rows: 9, 9 and 3 elements
    assert [it.shape_at(c) for c in coordinates(GRID)] == [(5,), (5,), (3,), (4,), (4,), (0,)]
    assert it.boxes_at((0, 1)) == [(((3, 4), (0, 3)), 0), (((4, 5), (0, 2)), 3)]
    assert it.placements == (RaggedShard((0, 1), (5, 4)), Shard(0))
    assert it.gradient is it and repr(it.states[0]) == "F(5:4)"


def test_a_flat_cut_of_one_dim_that_nobody_else_cuts_is_a_cut_of_the_dim() -> None:
    assert layout((RaggedShard((0,), (6, 6)), Replicate()), (12,)) is layout((Shard(0), Replicate()), (12,))
    nested = layout((RaggedShard((0,), (1, 3)), Shard(0)), (12,))
    assert nested.flat_axis == 0 and nested.shape_at((1, 2)) == (3,)
    direct = layout_of(GRID, (flat(1, (9, 3)), layout((Replicate(),) * 2, (12,)).states[0]), (12,))
    assert direct.flat_axis is None and direct.shape_at((0, 0)) == (9,)


@pytest.mark.parametrize(
    ("placements", "says"),
    [
        ((RaggedShard((0, 1), (5, 5)), Shard(0)), "sum to 10, and the shard that they cut has 9 elements"),
        ((RaggedShard((0, 1), (21,)), Replicate()), "has 1 units (21,) for the 2 ranks of axis 'dp'"),
        ((RaggedShard((0, 1), (22, -1)), Replicate()), "none negative"),
        ((RaggedShard((0, 2), (22, -1)), Replicate()), "takes one dim, or all of them"),
        ((RaggedShard((0, 1), (21, 0)), RaggedShard((0, 1), (7, 7, 7))), "one axis at most"),
    ],
)
def test_what_does_not_fit_says_so(placements, says) -> None:
    with pytest.raises(PlacementError) as caught:
        layout(placements, (7, 3))
    assert says in str(caught.value)
