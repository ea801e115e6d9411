"""view, reshape, flatten, unflatten on shards."""

from __future__ import annotations

import itertools
import random
import warnings
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vescale_dtensor import (
    FallbackWarning,
    ImplicitCommunicationError,
    InterleavedShard,
    OperatorError,
    Partial,
    PlacementError,
    RaggedShard,
    Replicate,
    ShapeError,
    Shard,
    ViewError,
    distribute_tensor,
    from_local,
)
from vescale_dtensor._communication import events as _events
from vescale_dtensor._layouts.layout import canonical_states
from vescale_dtensor._layouts.state import INVARIANT, PARTIAL, sharded
from vescale_dtensor._rules.registry import Call, Operand
from vescale_dtensor._rules.views.view import reshape_to
from vescale_testkit import assert_ranks_agree, mesh_of, raises_on_all, run_ranks
from vescale_testkit.oracle import ImaginedMesh, compare, imagined_layout, placements_for, shard_of

R, S, P = Replicate(), Shard, Partial()
MESHES = [(2, 2), (4,)]
MADE = {sizes: ImaginedMesh(*sizes) for sizes in [(2, 2), (4,), (3, 2), (2, 3, 2), (1, 4)]}


def native():
    warnings.simplefilter("error", FallbackWarning)


def values(*shape):
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()


GRID = [
    ((4, 6), [(24,), (2, 2, 6), (4, 3, 2), (6, 4), (8, 3), (1, 4, 6, 1), (-1, 2)]),
    ((5, 6), [(30,), (6, 5), (5, 2, 3), (15, 2)]),
    ((2, 3, 4), [(6, 4), (2, 12), (2, 3, 2, 2), (4, 6)]),
    ((3, 1, 4), [(3, 4), (3, 2, 2), (1, 3, 4)]),
    ((8,), [(2, 4), (2, 2, 2), (8, 1)]),
    ((1,), [(), (1, 1)]),
    ((0, 4), [(4, 0), (0, 2, 2), (2, 0, 7)]),
]


@pytest.mark.parametrize("sizes", MESHES)
def test_grid(sizes):
    def work():
        native()
        mesh = mesh_of(*sizes)
        for shape, targets in GRID:
            for target, placements in itertools.product(targets, placements_for(shape, len(sizes))):
                compare(lambda x, target=target: x.view(target), [values(*shape)], [placements], mesh, bitwise=True)

    run_ranks(4, work)


# --- the geometry alone, against every element --------------------------------------------


@st.composite
def factorisations(draw):
    """Two shapes of the same elements, a mesh, and placements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))
    shapes = []
    for _ in range(2):
        borders = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=3)))
        shapes.append(tuple(prod(factors[a:b]) for a, b in itertools.pairwise([0, *borders, len(factors)])))
    sizes = draw(st.sampled_from(list(MADE)))
    states = []
    for count in sizes:
        dim = draw(st.integers(0, len(shapes[0]) - 1))
        size = shapes[0][dim]
        kind = draw(st.sampled_from(["S", "S", "S", "I", "P", "groups", "units"]))
        if kind == "groups":
            states.append(sharded(dim, draw(st.sampled_from([g for g in range(1, size + 1) if size % g == 0]))))
        elif kind == "units":
            cuts = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
            states.append(sharded(dim, 1, tuple(b - a for a, b in itertools.pairwise([0, *cuts, size]))))
        else:
            states.append({"S": sharded(dim), "I": INVARIANT, "P": PARTIAL}[kind])
    return shapes[0], shapes[1], sizes, states


@settings(max_examples=800, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(factorisations())
def test_every_shard_holds_the_same_elements(case):
    before, after, sizes, states = case
    layout = imagined_layout(MADE[sizes], states, before)
    if layout is None:
        return
    decision = reshape_to(Call(torch.reshape, (), {}, [Operand(layout, False, 0)], layout.mesh), after)
    source, out = decision.targets and decision.targets[0] or layout, decision.out
    assert out.shape == after
    for state, moved in zip(layout.states, source.states):
        assert state.is_sharded or state is moved
    x = torch.arange(prod(before)).reshape(before)
    for coordinate in layout.mesh.coordinates:
        one, two = shard_of(x, source, coordinate), shard_of(x.reshape(after), out, coordinate)
        assert one.flatten().equal(two.flatten()), f"{source!r} -> {out!r} at {coordinate}"


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(factorisations())
def test_what_carries_over_carries_back(case):
    before, after, sizes, states = case
    layout = imagined_layout(MADE[sizes], states, before)
    if layout is None:
        return
    there = reshape_to(Call(torch.reshape, (), {}, [Operand(layout, False, 0)], layout.mesh), after)
    if not any(there.targets):
        back = reshape_to(Call(torch.reshape, (), {}, [Operand(there.out, False, 0)], layout.mesh), before)
        x = torch.arange(prod(before)).reshape(before)
        for coordinate in layout.mesh.coordinates:
            if not any(back.targets):
                assert shard_of(x, layout, coordinate).flatten().equal(shard_of(x, back.out, coordinate).flatten())


@pytest.mark.parametrize("sizes", MESHES)
def test_random_views(sizes):
    """Values and gradients, cuts of all kinds, the conversions of those that do not carry over included."""

    def work():
        native()
        mesh, choose, tried = mesh_of(*sizes), random.Random(1), 0
        while tried < 150:
            factors = choose.choices([1, 2, 2, 3, 4], k=choose.randint(1, 4))
            before, after = _grouped(factors, choose), _grouped(factors, choose)
            placements = [_placement(before, count, choose) for count in sizes]
            try:
                canonical_states("test", placements, mesh, before)
            except PlacementError:
                continue
            tried += 1
            compare(lambda x, after=after: x.reshape(after), [values(*before)], [placements], mesh, bitwise=True)

    run_ranks(4, work)


def _grouped(factors, choose):
    borders = sorted(choose.choices(range(len(factors) + 1), k=choose.randint(0, 3)))
    return tuple(prod(factors[a:b]) for a, b in itertools.pairwise([0, *borders, len(factors)]))


def _placement(shape, count, choose):
    dim = choose.randrange(len(shape))
    units = [choose.randrange(3) for _ in range(count - 1)]
    return choose.choice(
        [R, P, S(dim), S(dim), InterleavedShard(dim, choose.choice([2, 3, 4])), RaggedShard((dim,), (*units, 1))]
    )


# --- the patterns of transformers ---------------------------------------------------------

PATTERNS = [
    ("heads", (2, 4, 8), lambda x: x.view(2, 4, 4, 2), S(2), S(2)),
    ("heads back", (2, 4, 4, 2), lambda x: x.view(2, 4, -1), S(2), S(2)),
    ("tokens", (2, 4, 8), lambda x: x.view(8, 8), S(1), InterleavedShard(0, 2)),
    ("tokens back", (8, 8), lambda x: x.view(2, 4, 8), InterleavedShard(0, 2), S(1)),
    ("uneven tokens", (2, 5, 8), lambda x: x.flatten(0, 1), S(1), InterleavedShard(0, 2)),
    ("batch", (4, 2, 8), lambda x: x.view(-1, 8), S(0), S(0)),
    ("batch back", (8, 8), lambda x: x.view(4, 2, 8), S(0), S(0)),
    ("uneven heads", (2, 4, 6), lambda x: x.view(2, 4, 3, 2), S(2), S(2)),
    ("uneven batch", (5, 2), lambda x: x.view(-1), S(0), RaggedShard((0,), (2, 2, 1, 0))),
    ("uneven batch back", (10,), lambda x: x.view(5, 2), RaggedShard((0,), (2, 2, 1, 0)), S(0)),
    ("small batch", (1, 8), lambda x: x.view(-1), S(0), RaggedShard((0,), (1, 0, 0, 0))),
    ("qkv", (2, 4, 24), lambda x: x.view(2, 4, 3, 4, 2), InterleavedShard(2, 3), S(3)),
    ("qkv back", (2, 4, 3, 4, 2), lambda x: x.reshape(2, 4, 24), S(3), InterleavedShard(2, 3)),
    ("grouped heads", (2, 8, 4, 2), lambda x: x.view(2, 4, 2, 4, 2), S(1), S(1)),
    ("transposed", (2, 4, 3, 2), lambda x: x.transpose(1, 2).reshape(2, 3, 8), S(1), S(2)),
    ("partial", (2, 4, 8), lambda x: x.view(8, 4, 2), P, P),
    ("replicated", (2, 4, 8), lambda x: x.view(8, 4, 2), R, R),
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


def test_two_axes_without_communication():
    """Batch and sequence, batch and heads; the same dim cut by both."""
    cases = [
        ((4, 4, 8), (16, 8), [S(0), S(1)]),
        ((4, 4, 8), (16, 8), [S(1), S(0)]),
        ((4, 4, 8), (16, 8), [S(0), S(0)]),
        ((16, 8), (4, 4, 8), [S(0), S(0)]),
        ((4, 4, 8), (4, 4, 4, 2), [S(0), S(2)]),
        ((4, 4, 8), (4, 4, 4, 2), [S(2), S(2)]),
        ((4, 4, 24), (4, 4, 3, 4, 2), [S(1), InterleavedShard(2, 3)]),
        ((4, 4, 24), (4, 4, 3, 4, 2), [InterleavedShard(2, 3), InterleavedShard(2, 3)]),
        ((6, 2), (12,), [S(0), S(0)]),
    ]

    def work():
        native()
        mesh = mesh_of(2, 2)
        for shape, target, placements in cases:
            events = compare(lambda x, to=target: x.view(to), [values(*shape)], [placements], mesh, bitwise=True)
            assert events == [], f"{shape} {target} {placements}"

    run_ranks(4, work)


def test_uneven_heads_stay_whole():
    """6 columns in 3 heads over 2 ranks: the cut moves to a border between heads."""

    def work():
        native()
        mesh = mesh_of(2, 2)
        x = distribute_tensor(values(4, 6), mesh, [R, S(1)])
        y = x.view(4, 3, 2)
        assert list(y.placements) == [R, S(1)]
        assert list(y.flatten(1).placements) == [R, RaggedShard((1,), (2, 1))]
        events = compare(lambda x: x.view(4, 3, 2), [values(4, 6)], [[R, S(1)]], mesh, bitwise=True)
        assert [event.kind for event in events] == ["all_to_all"]

    run_ranks(4, work)


def test_merged_attention_needs_one_sum():
    """A GPT attention with merged weights, heads on 'tp': the only collective is what makes the result whole."""

    def attention(x, qkv, out):
        batch, tokens, width = x.shape
        q, k, v = torch.nn.functional.linear(x, qkv).split(width, dim=2)
        q, k, v = (t.view(batch, tokens, 4, width // 4).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1)
        y = (scores @ v).transpose(1, 2).contiguous().view(batch, tokens, width)
        return torch.nn.functional.linear(y, out)

    def work():
        native()
        mesh = mesh_of(2, 2)
        tensors = [values(2, 3, 8) / 48, values(24, 8) / 192, values(8, 8) / 64]
        layouts = [[S(0), R], [R, InterleavedShard(0, 3)], [R, S(1)]]
        assert compare(attention, tensors, layouts, mesh) == []

    run_ranks(4, work)


# --- what one device refuses, and what a copy must refuse ------------------------------------


def test_wrong_sizes_name_the_global_shape():
    def work():
        x = distribute_tensor(values(4, 6), mesh_of(4), [S(0)])
        x.view(5, -1)

    assert "global shape [4, 6]" in raises_on_all(4, ShapeError, work)


def test_strict_says_what_would_divide():
    def work():
        x = distribute_tensor(values(2, 4, 12), mesh_of(4, names=("tp",)), [S(2)])
        _events.strict_depth += 1
        try:
            x.view(2, 4, 6, 2)
        finally:
            _events.strict_depth -= 1

    text = raises_on_all(4, ImplicitCommunicationError, work)
    for part in ("dim 2 of [2, 4, 12]", "axis 'tp' (4)", "dim 2 (6), dim 3 (2) of [2, 4, 6, 2]", "such as 4 for 6"):
        assert part in text, text


def test_write_to_a_copied_view_raises():
    def work():
        x = distribute_tensor(values(2, 4, 12).detach(), mesh_of(4), [S(2)])
        x.view(2, 4, 6, 2).add_(1)

    raises_on_all(4, ViewError, work)


def test_write_to_a_view_reaches_its_base():
    def work():
        x = distribute_tensor(values(2, 4, 8).detach(), mesh_of(4), [S(2)])
        x.view(8, 4, 2).add_(1)
        return x.full_tensor()

    assert assert_ranks_agree(run_ranks(4, work)).equal(values(2, 4, 8).detach() + 1)


def test_a_shard_that_cannot_be_viewed_is_copied():
    """The whole tensor could be viewed; this shard is a strided part of another tensor."""

    def work():
        native()
        mesh = mesh_of(4)
        part = torch.arange(32.0).reshape(4, 8)[:, :2]
        x = from_local(part, mesh, [S(1)], shape=(4, 8))
        return x.view(32).full_tensor().sort().values

    run_ranks(4, work)


# --- other spellings --------------------------------------------------------------------------


def test_spellings():
    cases = [
        ((4, 6), lambda x: (x.flatten(), torch.flatten(x, 1), x.ravel(), torch.flatten(x, start_dim=0, end_dim=1))),
        ((4, 6), lambda x: (x.unflatten(0, (2, 2)), torch.unflatten(x, 1, (3, -1)), torch.nn.Flatten(0)(x))),
        ((4, 6), lambda x: (x.view_as(torch.zeros(6, 4)), x.reshape_as(x.t()))),
        ((4, 6), lambda x: (x.view(torch.Size([6, 4])), x.view(np.int64(6), -1))),
        ((4, 6), lambda x: (x.reshape((2, -1)), torch.reshape(x, (-1,)), torch.reshape(input=x, shape=(3, 8)))),
        ((), lambda x: (x.flatten(), x.view(1, 1), x.reshape(()), x.ravel())),
    ]

    def work():
        native()
        mesh = mesh_of(4)
        for shape, function in cases:
            for placements in placements_for(shape, 1):
                compare(function, [values(*shape)], [placements], mesh, bitwise=True)

    run_ranks(4, work)


def test_other_types():
    """view(dtype), view_as_real, view_as_complex."""

    def work():
        native()
        mesh = mesh_of(2, 2)
        for placements in placements_for((4, 6), 2, partial=False):
            x = values(4, 6).detach()
            for dtype in (torch.int64, torch.int32, torch.uint8):
                compare(lambda x, dtype=dtype: x.view(dtype), [x], [placements], mesh)
            compare(lambda x: x.view(dtype=torch.uint8), [x], [placements], mesh)
        for placements in placements_for((4, 2), 2):
            compare(lambda x: torch.view_as_complex(x) * 2, [values(4, 2)], [placements], mesh)
            compare(lambda x: torch.view_as_real(torch.view_as_complex(x)), [values(4, 2)], [placements], mesh)
        compare(lambda x: x.view(torch.int64), [values(4, 2).detach()], [[P, S(0)]], mesh)

    run_ranks(4, work)


def test_as_strided():
    def work():
        native()
        mesh = mesh_of(2, 2)
        for placements in placements_for((4, 6), 2):
            compare(lambda x: x.as_strided((3, 2), (6, 2), 1), [values(4, 6)], [placements], mesh)
            compare(lambda x: torch.as_strided(x, (2, 2, 2), (12, 3, 1)), [values(4, 6)], [placements], mesh)

    run_ranks(4, work)


def test_as_strided_of_a_transposed_shard_raises():
    def work():
        distribute_tensor(values(4, 8), mesh_of(4), [S(1)]).transpose(0, 1).as_strided((3,), (1,))

    assert "row-major" in raises_on_all(4, OperatorError, work)


def test_write_to_a_strided_copy_raises():
    def work():
        x = distribute_tensor(values(4, 6).detach(), mesh_of(4), [S(1)])
        x.as_strided((3, 2), (6, 2)).zero_()

    raises_on_all(4, ViewError, work)
