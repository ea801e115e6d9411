"""Layouts and their geometry: which part of a tensor each rank holds. Pure: no ranks, no processes."""

from __future__ import annotations

import gc
import itertools
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_dtensor import InterleavedShard, Partial, PlacementError, RaggedShard, Replicate, Shard
from vescale_dtensor._layouts.layout import canonical_states, layout_of
from vescale_dtensor._layouts.mesh import Mesh
from vescale_dtensor._layouts.region import cut, cut_sizes, divides, intersect, local_offset
from vescale_dtensor._layouts.state import INVARIANT, PARTIAL, REPLICATE, sharded
from vescale_dtensor._layouts.strides import global_stride, local_stride

LINE = Mesh((4,), ("tp",))
GRID = Mesh((2, 3), ("dp", "tp"))


def layout(placements, shape, mesh=GRID):
    return layout_of(mesh, canonical_states("test", placements, mesh, shape), shape)


def coordinates(mesh: Mesh):
    return list(itertools.product(*map(range, mesh.sizes)))


def indices(ranges) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]


def shard(tensor: torch.Tensor, regions) -> torch.Tensor:
    """The part of `tensor` that a region describes, by advanced indexing alone."""
    for dim, ranges in enumerate(regions):
        tensor = tensor.index_select(dim, torch.tensor(indices(ranges), dtype=torch.int64))
    return tensor


# --- one cut ------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(12))
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_an_uneven_cut_is_that_of_torch_chunk(size, count) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(count)] if size else []
    chunks += [[]] * (count - len(chunks))
    assert [indices(ranges) for ranges in cut(sharded(0), size, count)] == chunks
    assert cut_sizes(sharded(0), size, count) == tuple(map(len, chunks))


def test_an_interleaved_cut_takes_its_chunk_of_every_group() -> None:
    assert cut(sharded(0, groups=3), 12, 2) == (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12)))
    uneven = cut(sharded(0, groups=2), 6, 2)
    assert [indices(ranges) for ranges in uneven] == [[0, 1, 3, 4], [2, 5]]


def test_a_ragged_cut_has_the_proportions_of_its_units() -> None:
    assert [indices(r) for r in cut(sharded(0, units=(3, 0, 2)), 10, 3)] == [[0, 1, 2, 3, 4, 5], [], [6, 7, 8, 9]]
    assert sharded(0, units=(4, 2)) is sharded(0, units=(2, 1))


STATES = [
    sharded(0),
    sharded(0, groups=2),
    sharded(0, groups=3),
    sharded(0, units=(1, 2, 3)),
    sharded(0, units=(0, 5, 1)),
]


@pytest.mark.parametrize("state", STATES, ids=repr)
@pytest.mark.parametrize("size", [0, 6, 12, 30])
def test_every_cut_partitions_the_dim(state, size) -> None:
    assert divides(state, size)
    ranges = cut(state, size, 3)
    assert sorted(index for one in ranges for index in indices(one)) == list(range(size))
    assert cut_sizes(state, size, 3) == tuple(len(indices(one)) for one in ranges)


def test_whole_groups_and_whole_units_divide() -> None:
    assert divides(sharded(0, groups=3), 9) and not divides(sharded(0, groups=3), 10)
    assert divides(sharded(0, units=(3, 2)), 10) and not divides(sharded(0, units=(3, 2)), 11)
    assert not divides(sharded(0, units=(0, 0)), 4)
    assert divides(sharded(0), 5)


@pytest.mark.parametrize("old", STATES, ids=repr)
@pytest.mark.parametrize("new", STATES, ids=repr)
def test_intersections_and_offsets_find_every_index_again(old, new) -> None:
    for mine, theirs in itertools.product(cut(old, 12, 3), cut(new, 12, 3)):
        common = indices(intersect(mine, theirs))
        assert common == [index for index in indices(mine) if index in indices(theirs)]
        for index in common:
            assert indices(mine)[local_offset(mine, index)] == index
    with pytest.raises(IndexError):
        local_offset(((0, 2),), 2)


# --- layouts ------------------------------------------------------------------------

PLACEMENTS = [Replicate(), Partial(), Shard(0), Shard(1), InterleavedShard(0, 2), InterleavedShard(1, 2)]


@pytest.mark.parametrize("placements", list(itertools.product(PLACEMENTS, repeat=2)), ids=str)
@pytest.mark.parametrize("shape", [(12, 12), (8, 5), (2, 24), (4, 1)])
def test_regions_of_all_ranks_are_the_tensor_once_per_replica(placements, shape) -> None:
    try:
        it = layout(placements, shape)
    except PlacementError:  # a grouped dim that does not divide: says so, and is tested below
        return
    times = torch.zeros(shape, dtype=torch.int64)
    numbered = torch.arange(times.numel()).view(shape)
    for coordinate in coordinates(GRID):
        regions = it.region_at(coordinate)
        assert it.shape_at(coordinate) == tuple(len(indices(ranges)) for ranges in regions)
        times.view(-1)[shard(numbered, regions).reshape(-1)] += 1
    replicas = [size for size, state in zip(GRID.sizes, it.states) if not state.is_sharded]
    assert (times == torch.tensor(replicas).prod()).all()


def test_a_dim_that_two_axes_shard_is_cut_twice_the_left_axis_outermost() -> None:
    it = layout((Shard(0), Shard(0)), (10,))
    assert [it.region_at(c)[0] for c in coordinates(GRID)] == [
        ((0, 2),), ((2, 4),), ((4, 5),), ((5, 7),), ((7, 9),), ((9, 10),),
    ]  # fmt: skip
    assert it.size_at(0, 0) == 10
    assert [it.size_at(1, 0, c) for c in coordinates(GRID)] == [5] * 6
    assert it.axes_of(0) == (0, 1)


def test_nesting_in_an_interleaved_dim_keeps_the_local_order() -> None:
    it = layout((InterleavedShard(0, 2), Shard(0)), (12,))
    outer = [0, 1, 2, 6, 7, 8]
    parts = [indices(it.region_at((0, rank))[0]) for rank in range(3)]
    assert parts == [outer[0:2], outer[2:4], outer[4:6]]


def test_a_chunk_can_be_empty() -> None:
    it = layout((Shard(0),), (3, 2), LINE)
    assert [it.shape_at((rank,)) for rank in range(4)] == [(1, 2), (1, 2), (1, 2), (0, 2)]
    assert indices(it.region_at((3,))[0]) == []


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_any_layout_partitions_its_tensor(data) -> None:
    mesh = Mesh(tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3), label="mesh")))
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3), label="shape"))
    states = tuple(
        data.draw(st.sampled_from([INVARIANT, REPLICATE, PARTIAL, *[sharded(d) for d in range(len(shape))]]))
        for _ in mesh.sizes
    )
    it = layout_of(mesh, states, shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for coordinate in coordinates(mesh):
        if all(at == 0 for at, state in zip(coordinate, states) if not state.is_sharded):
            numbers = shard(torch.arange(seen.numel()).view(shape), it.region_at(coordinate))
            assert tuple(numbers.shape) == it.shape_at(coordinate)
            seen.view(-1)[numbers.reshape(-1)] += 1
    assert (seen == 1).all()


# --- identity -----------------------------------------------------------------------


def test_equal_layouts_are_one_object() -> None:
    a = layout((Shard(0), Replicate()), (4, 6))
    assert a is layout([Shard(-2), Replicate()], torch.Size([4, 6]))
    assert a is a.with_states(a.states) and a is a.with_shape((4, 6))
    assert a is not layout((Shard(0), Partial()), (4, 6))
    assert a is not layout_of(Mesh((2, 3), ("dp", "tp")), a.states, a.shape)  # another mesh is another layout


@pytest.mark.parametrize(
    ("placement", "size", "plain"),
    [
        (InterleavedShard(0, 1), 7, True),
        (RaggedShard((0,), (1, 1)), 8, True),
        (RaggedShard((0,), (2, 1)), 3, True),  # torch.chunk cuts 3 over 2 ranks so, too
        (RaggedShard((0,), (2, 1)), 6, False),
        (InterleavedShard(0, 2), 8, False),
    ],
)
def test_a_cut_that_equals_the_plain_one_is_written_as_it(placement, size, plain) -> None:
    mesh = Mesh((2,))
    assert (layout((placement,), (size,), mesh) is layout((Shard(0),), (size,), mesh)) == plain


def test_the_gradient_follows_from_the_state() -> None:
    mesh = Mesh((2, 2, 2, 2))
    it = layout_of(mesh, (sharded(0), PARTIAL, INVARIANT, REPLICATE), (4,))
    assert it.gradient.states == (sharded(0), REPLICATE, INVARIANT, PARTIAL)
    assert it.invariant.states == (INVARIANT,) * 4
    assert it.placements == (Shard(0), Partial(), Replicate(), Replicate())
    assert it.is_partial and not it.is_replicated and it.invariant.is_replicated


def test_what_is_pending_is_alike_on_all_ranks_once_it_is_reduced() -> None:
    mesh = Mesh((2, 2, 2, 2))
    it = layout_of(mesh, (sharded(0), PARTIAL, INVARIANT, REPLICATE), (4,))
    assert it.reduced is layout_of(mesh, (sharded(0), INVARIANT, INVARIANT, REPLICATE), (4,))
    assert it.reduced.reduced is it.reduced and it.untracked.reduced is it.reduced
    assert it.gradient.reduced.states == (sharded(0), REPLICATE, INVARIANT, INVARIANT)


def test_the_untracked_twin_says_the_same() -> None:
    it = layout((Shard(0), Replicate()), (4, 6))
    assert it.untracked.base is it and it.base is it
    assert it.untracked.is_untracked and not it.is_untracked
    assert it.untracked.local_shape == it.local_shape


def test_layouts_nobody_holds_are_forgotten() -> None:
    mesh = Mesh((2,), ("gone",))
    watched = weakref.ref(layout_of(mesh, (sharded(0),), (97,)))
    mesh_alive = weakref.ref(mesh)
    del mesh
    gc.collect()
    assert watched() is None and mesh_alive() is None


def test_a_layout_does_not_travel_and_placements_do() -> None:
    with pytest.raises(PlacementError, match="cannot travel"):
        pickle.dumps(layout((Shard(0), Replicate()), (4, 6)))
    for placement in (Shard(1), Replicate(), Partial(), InterleavedShard(0, 3), RaggedShard((0,), (2, 1))):
        assert pickle.loads(pickle.dumps(placement)) == placement
    assert pickle.loads(pickle.dumps(sharded(1, 3))) is sharded(1, 3)
    assert pickle.loads(pickle.dumps(REPLICATE)) is REPLICATE
    restore, written = sharded(1, 3).__reduce__()
    assert restore(*written[:-1]) is sharded(1, 3)  # by a release that knew no order of chunks


def test_a_layout_reads_well() -> None:
    it = layout((InterleavedShard(0, 2), Replicate()), (8, 6))
    assert repr(it) == "[8, 6] S(0, groups=2), R on (dp=2, tp=3)"
    assert repr(layout((RaggedShard((1,), (4, 2)), Partial()), (8, 6))) == "[8, 6] S(1, units=2:1), P on (dp=2, tp=3)"


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 3, 2), (2, 2, 2, 2)], ids=str)
def test_the_order_in_memory_of_the_whole_is_read_from_any_shard(sizes, shape):
    mesh = Mesh(sizes, ("a", "b", "c")[: len(sizes)])
    placements = [Replicate(), *map(Shard, range(len(shape)))]
    for chosen in itertools.product(placements, repeat=len(sizes)):
        part = layout(chosen, shape, mesh)
        for order in itertools.permutations(range(len(shape))):
            back = sorted(range(len(shape)), key=order.__getitem__)
            whole = torch.empty(shape).permute(order).contiguous().permute(back).stride()
            assert global_stride(local_stride(whole, part), part.local_shape, part) == whole, (chosen, order)
