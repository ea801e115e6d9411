"""cat, stack, split, chunk, unbind, diagonal, unfold, ... on shards."""

from __future__ import annotations

import itertools
import random
import warnings
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_dtensor import (
    FallbackWarning,
    ImplicitCommunicationError,
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    ShapeError,
    Shard,
    distribute_tensor,
)
from vescale_dtensor._communication import events
from vescale_dtensor._dispatch.signature import solve
from vescale_dtensor._layouts.state import INVARIANT, sharded
from vescale_dtensor._rules.registry import Call, Operand
from vescale_dtensor._rules.views.join import cat, split
from vescale_testkit import mesh_of, raises_on_all, run_ranks
from vescale_testkit.oracle import ImaginedMesh, compare, imagined_layout, placements_for, shard_of

R, S, P = Replicate(), Shard, Partial()
MESHES = [(2, 2), (4,)]
MADE = {sizes: ImaginedMesh(*sizes) for sizes in [(2, 2), (1, 3), (3, 2)]}


def native():
    warnings.simplefilter("error", FallbackWarning)


def values(*shape):
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()


# --- parting ------------------------------------------------------------------------------

PARTS = [
    ((5, 6), lambda x: (*x.split(2, 1), *torch.split(x, [1, 0, 4]), *x.split(4, dim=-1))),
    ((5, 6), lambda x: (*x.chunk(2), *torch.chunk(x, 4, dim=1), *x.split_with_sizes((2, 4), 1))),
    ((5, 3), lambda x: (*x.unbind(), *torch.unbind(x, -1), *x)),
    ((5, 6), lambda x: (*x.tensor_split(2), *torch.tensor_split(x, (1, 3), dim=1))),
    ((5, 6), lambda x: (*x.hsplit(2), *torch.vsplit(x, [1, 3]))),
    ((4, 6), lambda x: (*torch.split(tensor=x, split_size_or_sections=2, dim=1), *torch.chunk(input=x, chunks=2))),
    ((4, 4), lambda x: (x.diagonal(), torch.diagonal(x, 1), torch.diag_embed(x), torch.diag_embed(x, 1, 0, 2))),
    ((2, 4, 4), lambda x: (x.diagonal(0, 1, 2), torch.linalg.diagonal(x), x.unfold(1, 2, 1), x.unfold(-1, 3, 2))),
]


@pytest.mark.parametrize("sizes", MESHES)
def test_parts(sizes):
    def work():
        native()
        mesh = mesh_of(*sizes)
        for shape, function in PARTS:
            for placements in placements_for(shape, len(sizes)):
                compare(function, [values(*shape)], [placements], mesh, bitwise=True)
        groups = [InterleavedShard(1, 6), InterleavedShard(1, 3), InterleavedShard(1, 2)]
        for placements in placements_for((2, 24), len(sizes), kinds=groups):
            compare(lambda x: x.chunk(3, 1), [values(2, 24)], [placements], mesh, bitwise=True)
            compare(lambda x: x.split([8, 0, 4, 12], 1), [values(2, 24)], [placements], mesh, bitwise=True)

    run_ranks(4, work)


SPLITS = [
    ("qkv", (2, 24), lambda x: x.split(8, 1), InterleavedShard(1, 3), [S(1)] * 3),
    ("uneven qkv", (2, 15), lambda x: x.split(5, 1), InterleavedShard(1, 3), [S(1)] * 3),
    ("gate and up", (2, 16), lambda x: x.chunk(2, -1), InterleavedShard(1, 2), [S(1)] * 2),
    ("q and kv", (2, 24), lambda x: x.split([16, 8], -1), InterleavedShard(1, 3), [InterleavedShard(1, 2), S(1)]),
    ("halves of four", (2, 32), lambda x: x.chunk(2, -1), InterleavedShard(1, 4), [InterleavedShard(1, 2)] * 2),
    ("another dim", (4, 6), lambda x: x.split(2, 1), S(0), [S(0)] * 3),
    ("partial", (4, 6), lambda x: x.split(2, 1), P, [P] * 3),
    ("one piece", (4, 6), lambda x: x.split(6, 1), S(1), [S(1)]),
    ("layers", (3, 8), lambda x: x.unbind(0), S(1), [S(0)] * 3),
]


def test_splits_without_communication():
    def work():
        native()
        mesh = mesh_of(4)
        for name, shape, function, before, after in SPLITS:
            assert compare(function, [values(*shape)], [[before]], mesh, bitwise=True) == [], name
            found = [list(out.placements) for out in function(distribute_tensor(values(*shape), mesh, [before]))]
            assert found == [[one] for one in after], f"{name}: {found}"

    run_ranks(4, work)


def test_strict_split_names_the_cut_that_works():
    def work():
        x = distribute_tensor(values(2, 24), mesh_of(4, names=("tp",)), [S(1)])
        events.strict_depth += 1
        try:
            x.split(8, dim=1)
        finally:
            events.strict_depth -= 1

    text = raises_on_all(4, ImplicitCommunicationError, work)
    assert "InterleavedShard(1, 3)" in text and "axis 'tp' (4)" in text, text


@st.composite
def groupings(draw):
    """The size of a dim, pieces of it, and a nested cut of it into groups."""
    unit, pieces = draw(st.integers(1, 4)), draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    size = unit * sum(pieces)
    divisors = [g for g in range(1, size + 1) if size % g == 0] or [1]
    return size, [unit * piece for piece in pieces], draw(st.lists(st.sampled_from(divisors), min_size=2, max_size=2))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(groupings(), st.sampled_from(list(MADE)))
def test_every_piece_holds_the_same_elements(case, sizes):
    size, pieces, groups = case
    layout = imagined_layout(MADE[sizes], [sharded(1, count) for count in groups], (2, size))
    if layout is None:
        return
    decision = split(Call(torch.split, (None, pieces, 1), {}, [Operand(layout, False, 0)], layout.mesh))
    source = decision.targets[0] or layout
    x = torch.arange(2 * size).reshape(2, size)
    for coordinate in MADE[sizes].coordinates:
        lengths = [out.shape_at(coordinate)[1] for out in decision.out]
        local = shard_of(x, source, coordinate).split(lengths, 1)
        for part, whole, out in zip(local, x.split(pieces, 1), decision.out):
            assert part.equal(shard_of(whole, out, coordinate)), f"{source!r} -> {out!r} at {coordinate}"


@settings(max_examples=500, deadline=None, derandomize=True)
@given(groupings(), st.sampled_from(list(MADE)), st.data())
def test_joined_parts_hold_the_same_elements(case, sizes, data):
    _, pieces, groups = case
    operands = []
    for index, size in enumerate(pieces):
        kinds = [INVARIANT, sharded(1), sharded(0)]
        states = [
            data.draw(st.sampled_from([*kinds, sharded(1, count)] if size % count == 0 else kinds)) for count in groups
        ]
        layout = imagined_layout(MADE[sizes], states, (2, size))
        if layout is None:
            return
        operands.append(Operand(layout, False, index))
    asked = Call(torch.cat, (operands, 1), {}, operands, operands[0].layout.mesh)
    decision = solve(asked, cat(asked))
    xs = [torch.arange(2 * size).reshape(2, size) + 100 * i for i, size in enumerate(pieces)]
    sources = [target or operand.layout for target, operand in zip(decision.targets, operands)]
    for coordinate in MADE[sizes].coordinates:
        local = torch.cat([shard_of(x, source, coordinate) for x, source in zip(xs, sources)], 1)
        assert local.equal(shard_of(torch.cat(xs, 1), decision.out, coordinate)), f"{sources} -> {decision.out!r}"


# --- joining ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES)
def test_joins(sizes):
    def work():
        native()
        mesh = mesh_of(*sizes)
        kinds = [InterleavedShard(0, 2)]
        pairs = list(itertools.product(placements_for((4, 3), len(sizes), kinds=kinds), repeat=2))
        for one, two in random.Random(0).sample(pairs, min(len(pairs), 150)):
            for dim in (0, 1):
                compare(lambda x, y, dim=dim: torch.cat([x, y, x], dim), [values(4, 3), values(4, 3)], [one, two], mesh)
            if len(sizes) == 1:
                compare(lambda x, y: torch.stack([x, y], -2), [values(4, 3), values(4, 3)], [one, two], mesh)
                compare(lambda x, y: torch.cat((x, y)), [values(8, 3), values(4, 3)], [one, two], mesh)

    run_ranks(4, work)


JOINS = [
    ("gate and up", [(2, 8), (2, 8)], 1, [S(1), S(1)], InterleavedShard(1, 2)),
    ("uneven halves", [(2, 5), (2, 5)], 1, [S(1), S(1)], InterleavedShard(1, 2)),
    ("q and kv", [(2, 16), (2, 8)], 1, [InterleavedShard(1, 2), S(1)], InterleavedShard(1, 3)),
    ("a replicated one is sliced", [(2, 8), (2, 16)], 1, [S(1), R], InterleavedShard(1, 3)),
    ("another dim", [(4, 8), (4, 2)], 1, [S(0), S(0)], S(0)),
    ("partial and whole", [(4, 8), (4, 2)], 1, [P, R], P),
]


def test_joins_without_communication():
    def work():
        native()
        mesh = mesh_of(4)
        for name, shapes, dim, before, after in JOINS:
            tensors = [values(*shape) for shape in shapes]
            layouts = [[one] for one in before]
            assert compare(lambda x, y, dim=dim: torch.cat([x, y], dim), tensors, layouts, mesh) == [], name
            x, y = (distribute_tensor(t, mesh, p) for t, p in zip(tensors, layouts))
            assert list(torch.cat([x, y], dim).placements) == [after], name

    run_ranks(4, work)


def test_rotate_half():
    def rotate(x):
        one, two = x.chunk(2, -1)
        return torch.cat((-two, one), dim=-1)

    def work():
        native()
        mesh = mesh_of(2, 2)
        assert compare(rotate, [values(2, 2, 4, 6)], [[S(0), S(1)]], mesh) == []

    run_ranks(4, work)


def test_spellings():
    def work():
        native()
        mesh = mesh_of(4)
        for name in ("hstack", "vstack", "dstack", "row_stack", "column_stack"):
            for shape in ((4,), (4, 4), (4, 4, 2), ()):
                for placements in placements_for(shape, 1):
                    function = getattr(torch, name)
                    compare(lambda x, y, stack=function: stack([x, y]), [values(*shape)] * 2, [placements] * 2, mesh)
        x = values(4, 4)
        for placements in placements_for((4, 4), 1):
            compare(lambda x, y: torch.concat((x, y), dim=1), [x, x], [placements, None], mesh)
            compare(lambda x, y: torch.concatenate((x, y), axis=-1), [x, x.float()], [placements, [R]], mesh)
            compare(lambda x, y: torch.cat([y, x]), [x, values(0)], [placements, None], mesh)
            compare(lambda x, y: x.tensor_split(y), [x, torch.tensor([1, 3])], [placements, None], mesh)
            compare(lambda x, y: torch.tensor_split(x, y, 1), [x, torch.tensor(3)], [placements, None], mesh)
            compare(lambda x, y: torch.stack(tensors=[x, y], dim=1), [x, x], [placements, [S(1)]], mesh)

    run_ranks(4, work)


def test_shapes_that_differ_raise():
    def work():
        mesh = mesh_of(4)
        torch.cat([distribute_tensor(values(*shape), mesh, [S(0)]) for shape in ((4, 2), (4, 3))])

    assert "global shapes differ" in raises_on_all(4, ShapeError, work)


def test_ragged_parts_are_made_whole():
    def work():
        native()
        mesh = mesh_of(4)
        ragged = [RaggedShard((0,), (3, 0, 1, 2))]
        compare(lambda x: (*x.split(2), *x.unbind(1)), [values(6, 3)], [ragged], mesh)
        compare(lambda x: torch.cat([x, x]), [values(6, 3)], [ragged], mesh)

    run_ranks(4, work)
