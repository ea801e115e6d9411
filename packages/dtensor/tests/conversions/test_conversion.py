"""Conversions: the planner (pure), and every pair of design section 3 on real ranks, forward, backward, twice backward.

The definition: a layout says how the locals of all ranks denote one full tensor (shards
are put side by side, partial parts are added, replicas are equal). A conversion keeps
what is denoted; so does its backward for the gradient, whose layout is `layout.gradient`.
"""

from __future__ import annotations

import heapq
import itertools
import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from vescale_dtensor._conversions.conversion import (
    COLLECTIVES,
    STEP,
    axis_cost,
    communicates,
    is_alias,
    plan,
    step_elements,
)
from vescale_dtensor._conversions.convert import alias, convert
from vescale_dtensor._layouts.layout import Layout, layout_of
from vescale_dtensor._layouts.mesh import Mesh, mesh_of
from vescale_dtensor._layouts.region import divides
from vescale_dtensor._layouts.state import INVARIANT, PARTIAL, REPLICATE, State, sharded
from vescale_dtensor._tensor.tensor import attach
from vescale_testkit import in_turns, run_ranks, slice_of
from vescale_testkit import mesh_of as device_mesh_of

I, R, P, S0, S1 = INVARIANT, REPLICATE, PARTIAL, sharded(0), sharded(1)
GROUPED = sharded(0, groups=2)
LINE, GRID = Mesh((4,), ("tp",)), Mesh((2, 2), ("dp", "tp"))

# --- the planner, pure --------------------------------------------------------------

# Design section 3, as it is printed there.
TABLE = """
    I -> R   nothing          all_reduce
    R -> I   nothing          keep_on_first
    I -> S   slice            all_gather
    R -> S   slice            pad
    P -> I   all_reduce       nothing
    P -> R   all_reduce       all_reduce
    P -> S   reduce_scatter   all_gather
    S -> R   all_gather       reduce_scatter
    S -> I   all_gather       slice
    S -> T   all_to_all       all_to_all
    I -> P   keep_on_first    nothing
    R -> P   keep_on_first    keep_on_first
    S -> P   pad              slice
"""
ROWS = [row.replace("->", "").split() for row in TABLE.strip().splitlines()]
STATE_OF = {"I": I, "R": R, "P": P, "S": S0, "T": S1}


def kinds(source: Layout, target: Layout) -> list[str]:
    return [step.kind for step in plan(source, target)]


@pytest.mark.parametrize(("a", "b", "forward", "backward"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_the_table_of_the_design(a, b, forward, backward) -> None:
    source, target = (layout_of(LINE, (STATE_OF[name],), (8, 8)) for name in (a, b))
    assert kinds(source, target) == [forward]
    assert (kinds(target.gradient, source.gradient) or ["nothing"]) == [backward]
    assert STEP[STATE_OF[a].kind, STATE_OF[b].kind] == forward


def test_a_conversion_to_the_same_layout_is_no_step() -> None:
    for state in (I, R, P, S0, GROUPED):
        layout = layout_of(LINE, (state,), (8, 8))
        assert plan(layout, layout) == plan(layout, layout.untracked) == ()
        assert is_alias(layout, layout) and not communicates(layout, layout)


def test_costs_are_the_elements_a_rank_receives() -> None:
    one = {kind: step_elements(kind, 0, layout_of(LINE, (S0,), (8, 8))) for kind in (*COLLECTIVES, "slice", "pad")}
    assert one == {
        "all_reduce": 2 * 64 * 3 / 4, "all_gather": 64 * 3 / 4, "reduce_scatter": 64 * 3 / 4, "all_to_all": 64 * 3 / 16,
        "slice": 0, "pad": 0,
    }  # fmt: skip
    # A tensor that another axis shards is the smaller.
    assert step_elements("all_gather", 1, layout_of(GRID, (S1, S0), (8, 8))) == 32 / 2
    assert axis_cost(S0, R, 4, 64) == (48, 48)
    assert axis_cost(S0, I, 4, 64) == (48, 0)
    assert axis_cost(P, S0, 4, 64) == (48, 48)
    assert axis_cost(I, R, 4, 64) == (0, 96)
    assert axis_cost(R, R, 4, 64) == (0, 0)


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ((S0, S0), (S0, R), ["all_gather 1"]),
        ((S0, S0), (R, R), ["all_gather 1", "all_gather 0"]),
        ((R, R), (S0, S0), ["slice 0", "slice 1"]),
        ((R, S0), (S0, S0), ["all_gather 1", "slice 0", "slice 1"]),  # the inner cut must be undone first
        ((S0, R), (R, S0), ["all_gather 0", "slice 1"]),
        ((P, P), (I, I), ["all_reduce 0", "all_reduce 1"]),
        ((P, S0), (S1, S0), ["reduce_scatter 0"]),
        ((S0, P), (S0, S0), ["reduce_scatter 1"]),
        ((I, S1), (S0, S1), ["slice 0"]),
        ((I, S1), (S0, I), ["slice 0", "all_gather 1"]),  # slice first: the gather is half as large
        ((P, S1), (I, S0), ["all_to_all 1", "all_reduce 0"]),
        ((S0, S1), (S1, S0), None),
    ],
)
def test_nested_cuts_open_from_the_inside_and_the_cheapest_order_wins(source, target, steps) -> None:
    found = plan(layout_of(GRID, source, (8, 8)), layout_of(GRID, target, (8, 8)))
    for step in found:
        dims = {s.dim for s in (step.before.states[step.axis], step.after.states[step.axis]) if s.kind == "S"}
        assert not any(s.kind == "S" and s.dim in dims for s in step.before.states[step.axis + 1 :])
    if steps is not None:
        assert sorted(f"{step.kind} {step.axis}" for step in found) == sorted(steps)
        assert round_trip(found) == cheapest(found[0].before, found[-1].after)


def round_trip(steps) -> float:
    """Elements received forward and backward, from the steps' own states."""
    total = 0.0
    for step in steps:
        before, after = step.before.states[step.axis], step.after.states[step.axis]
        total += step.elements
        if before.gradient is not after.gradient:
            total += step_elements(STEP[after.gradient.kind, before.gradient.kind], step.axis, step.after)
    return total


def cheapest(source: Layout, target: Layout) -> float:
    """By relaxation over every layout whose axes are as at either end, or replicated."""
    choices = [{I, R, *ends} for ends in zip(source.states, target.states)]
    best, tick = {source: 0.0}, itertools.count()
    queue = [(0.0, next(tick), source)]
    while queue:
        cost, _, here = heapq.heappop(queue)
        if here is target:
            return cost
        for axis, state in [(axis, state) for axis, states in enumerate(choices) for state in states]:
            now = here.states[axis]
            if state is now or (now.kind, state.kind) not in STEP:
                continue
            dims = {s.dim for s in (now, state) if s.kind == "S"}
            if any(s.kind == "S" and s.dim in dims for s in here.states[axis + 1 :]):
                continue
            there = here.with_states((*here.states[:axis], state, *here.states[axis + 1 :]))
            price = step_elements(STEP[now.kind, state.kind], axis, here)
            if state.gradient is not now.gradient:
                price += step_elements(STEP[state.gradient.kind, now.gradient.kind], axis, there)
            if cost + price < best.get(there, float("inf")):
                best[there] = cost + price
                heapq.heappush(queue, (cost + price, next(tick), there))
    raise AssertionError("no way")


def test_no_plan_costs_more_than_any_other_way() -> None:
    layouts = [layout_of(GRID, pair, (8, 8)) for pair in itertools.product((I, R, P, S0, S1), repeat=2)]
    for source, target in slice_of(itertools.product(layouts, layouts), 5):
        found, best = round_trip(plan(source, target)), cheapest(source, target)
        assert found <= best * 1.0001, (source, target)


# --- the definition -----------------------------------------------------------------


class Case(NamedTuple):
    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    source: tuple[State, ...]
    target: tuple[State, ...]
    dtype: torch.dtype = torch.float32


def numbers(shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers: sums of them are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-4, 5, (2, *shape), generator=generator)
    if dtype.is_complex:
        return torch.complex(whole[0].float(), whole[1].float()).to(dtype)
    return (
        (whole[0] > 0)
        if dtype is torch.bool
        else whole[0].abs().to(dtype)
        if dtype is torch.uint8
        else whole[0].to(dtype)
    )


def coordinates(mesh: Mesh):
    return list(itertools.product(*map(range, mesh.sizes)))


def at(layout: Layout, coordinate) -> tuple:
    """The index that selects a shard."""
    regions = layout.region_at(coordinate)
    return tuple(
        torch.tensor([i for start, stop in ranges for i in range(start, stop)], dtype=torch.int64).view(
            [-1 if d == dim else 1 for d in range(len(regions))]
        )
        for dim, ranges in enumerate(regions)
    )


def locals_of(full: torch.Tensor, layout: Layout, seed: int) -> dict[tuple, torch.Tensor]:
    """Locals of all ranks that denote `full`; on partial axes every rank holds another part."""
    partial = [axis for axis, state in enumerate(layout.states) if state is PARTIAL]
    parts = {}
    rest = full
    for place in reversed(list(itertools.product(*[range(layout.mesh.sizes[axis]) for axis in partial]))):
        if not any(place):
            parts[place] = rest
        else:
            seed += 1
            parts[place] = (
                numbers(full.shape, full.dtype, seed) & full
                if full.dtype is torch.bool
                else numbers(full.shape, full.dtype, seed)
            )
            rest = rest if full.dtype is torch.bool else rest - parts[place]
    return {
        coordinate: parts[tuple(coordinate[axis] for axis in partial)][at(layout, coordinate)]
        if layout.ndim
        else parts[tuple(coordinate[axis] for axis in partial)]
        for coordinate in coordinates(layout.mesh)
    }


def denoted(locals_: dict[tuple, torch.Tensor], layout: Layout, what: str) -> torch.Tensor:
    """The full tensor that the locals of all ranks mean. Asserts that replicas are equal."""
    first = next(iter(locals_.values()))
    total = torch.zeros(layout.shape, dtype=first.dtype)
    seen: dict[tuple, torch.Tensor] = {}
    for coordinate, local in locals_.items():
        assert tuple(local.shape) == layout.shape_at(coordinate), f"{what}: shape of the shard at {coordinate}"
        apart = tuple(c for c, state in zip(coordinate, layout.states) if not state.is_replicated)
        if apart in seen:
            assert torch.equal(seen[apart], local), f"{what}: replicas differ at {coordinate}"
            continue
        seen[apart] = local
        if not layout.ndim:
            total = total + local
        elif local.numel():
            index = at(layout, coordinate)
            total[index] = total[index] | local if local.dtype is torch.bool else total[index] + local
    return total


def run_cases(cases: list[Case]) -> list[tuple]:
    """On a rank: per case the local result, gradient, and gradient of the gradient."""
    answers = []
    for number, case in enumerate(cases):
        mesh = mesh_of(device_mesh_of(*case.mesh))
        source, target = layout_of(mesh, case.source, case.shape), layout_of(mesh, case.target, case.shape)
        differentiable = case.dtype.is_floating_point or case.dtype.is_complex

        def mine(layout, seed, case=case, number=number, mesh=mesh):
            full = numbers(case.shape, case.dtype, 1000 * number + seed)
            return locals_of(full, layout, 1000 * number + seed + 100)[mesh.coordinate].clone()

        x = attach(mine(source, 0), source).requires_grad_(differentiable)
        y = convert(x, target)
        assert y.mesh_layout is target and y.shape == torch.Size(case.shape)
        if not differentiable:
            answers.append((y.to_local(),))
            continue
        seed = mine(target.gradient, 1).requires_grad_()
        (gx,) = torch.autograd.grad([alias(y)], [x], [seed], create_graph=True)
        assert gx.mesh_layout is source.gradient
        (gs,) = torch.autograd.grad([alias(gx)], [seed], [mine(source.gradient.gradient, 2)])
        answers.append(tuple(t.detach().clone().contiguous() for t in (y.to_local(), gx.to_local(), gs)))
    return answers


def check(cases: list[Case]) -> None:
    """Runs the cases on four ranks and compares with the definition."""
    by_rank = run_ranks(4, run_cases, cases, timeout=300)
    for number, case in enumerate(cases):
        mesh = Mesh(case.mesh)
        source, target = layout_of(mesh, case.source, case.shape), layout_of(mesh, case.target, case.shape)
        outcome = zip(*[answers[number] for answers in by_rank])
        layouts = (target, source.gradient, target.gradient.gradient)
        for what, seed, layout, locals_ in zip(("value", "gradient", "second gradient"), range(3), layouts, outcome):
            full = numbers(case.shape, case.dtype, 1000 * number + seed)
            found = denoted(dict(zip(coordinates(mesh), locals_)), layout, f"{what} of {case}")
            assert torch.equal(found, full), f"{what} of {case}"


def is_possible(mesh: Mesh, states, shape) -> bool:
    """Whether the cuts divide, each in what the axes before it leave."""
    for axis, state in enumerate(states):
        if state.kind == "S":
            before = layout_of(mesh, (*states[:axis], *[I] * (mesh.ndim - axis)), shape)
            if not all(divides(state, before.size_at(axis, state.dim, c)) for c in coordinates(mesh)):
                return False
    return True


def pairs(mesh: Mesh, shape, states, dtype=torch.float32) -> list[Case]:
    layouts = [one for one in itertools.product(states, repeat=mesh.ndim) if is_possible(mesh, one, shape)]
    return [Case(mesh.sizes, shape, a, b, dtype) for a, b in itertools.product(layouts, layouts)]


# --- every pair, on real ranks ------------------------------------------------------

ON_LINE = {
    (8, 4): (I, R, P, S0, S1, GROUPED, sharded(0, units=(1, 0, 4, 3)), sharded(1, groups=2)),
    (10, 3): (I, R, P, S0, S1, GROUPED, sharded(0, units=(1, 0, 2, 2)), sharded(1, groups=3)),
    (2, 6): (I, R, P, S0, S1, GROUPED, sharded(1, units=(0, 1, 1, 1))),
    (1, 8): (I, R, P, S0, S1, sharded(1, groups=2)),
    (0, 3): (I, R, P, S0, S1, GROUPED),
    (): (I, R, P),
}


@pytest.mark.parametrize("shape", ON_LINE, ids=str)
def test_every_pair_on_one_axis(shape) -> None:
    check(pairs(LINE, shape, ON_LINE[shape]))


ON_GRID = {
    (8, 4): (I, R, P, S0, S1, GROUPED, sharded(0, units=(1, 3))),
    (5, 3): (I, R, P, S0, S1, sharded(0, units=(2, 3)), sharded(1, groups=3)),
    (6, 1): (I, R, P, S0, S1, GROUPED, sharded(0, units=(0, 1))),
}


@in_turns(3)
@pytest.mark.parametrize("shape", ON_GRID, ids=str)
def test_every_pair_on_two_axes(shape) -> None:
    """2401 pairs a shape, of which a slice runs and all with VESCALE_GRID=full."""
    check(slice_of(pairs(GRID, shape, ON_GRID[shape]), 10))


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128, torch.int64, torch.int32,
     torch.int16, torch.uint8, torch.bool],
    ids=str,
)  # fmt: skip
def test_every_dtype(dtype) -> None:
    check(pairs(LINE, (6, 5), (I, R, P, S0, S1, GROUPED), dtype))


def test_lazy_conjugates_and_negatives_travel_as_what_they_mean() -> None:
    def run() -> None:
        mesh = mesh_of(device_mesh_of(4))
        full = torch.complex(torch.arange(8.0), torch.arange(8.0) + 1).view(4, 2)
        for lazy, eager in ((full.conj(), full.conj().resolve_conj()), (torch._neg_view(full), -full)):
            local = lazy[mesh.coordinate[0] : mesh.coordinate[0] + 1]
            assert local.is_conj() or local.is_neg()
            shard = attach(local, layout_of(mesh, (S0,), (4, 2)))
            whole = convert(shard, shard.mesh_layout.invariant).to_local()
            assert torch.equal(whole.resolve_conj().resolve_neg(), eager)
            moved = convert(shard, layout_of(mesh, (S1,), (4, 2)))
            assert torch.equal(moved.full_tensor().resolve_conj().resolve_neg(), eager)
            total = attach(lazy.detach(), layout_of(mesh, (P,), (4, 2))).full_tensor()
            assert torch.equal(total.resolve_conj().resolve_neg(), 4 * eager)

    run_ranks(4, run)


def test_large_tensors_take_the_other_road_of_an_all_reduce() -> None:
    """Above 4096 elements a reduction on gloo is two collectives; the size need not divide."""
    check([Case((4,), (4099,), (P,), (state,)) for state in (I, R, S0)])
    check([Case((2, 2), (67, 63), (P, P), pair) for pair in ((I, I), (R, S1), (S0, S0))])


# --- random shapes, layouts and meshes ----------------------------------------------


@st.composite
def random_cases(draw) -> Case:
    mesh = draw(st.sampled_from([(2, 2), (4,), (2, 1, 2), (1, 4)]))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    choices = [I, R, P]
    for dim, size in enumerate(shape):
        choices.append(sharded(dim))
        choices += [sharded(dim, groups=g) for g in (2, 3) if size % g == 0]
    whole = Mesh(mesh)

    def layout():
        states = tuple(draw(st.sampled_from(choices)) for _ in mesh)
        if shape and draw(st.integers(0, 3)) == 0:  # a ragged cut of the outermost axis
            units = tuple(draw(st.integers(0, 3)) for _ in range(mesh[0]))
            states = (sharded(draw(st.integers(0, len(shape) - 1)), units=units), *states[1:]) if sum(units) else states
        return states if is_possible(whole, states, shape) else (draw(st.sampled_from([I, R, P])),) * len(mesh)

    return Case(mesh, shape, layout(), layout())


@given(st.lists(random_cases(), min_size=60, max_size=70))
@settings(
    max_examples=40 if os.environ.get("VESCALE_GRID") == "full" else 4, deadline=None, database=None,
    phases=[Phase.generate],  # a failure names its one case: nothing to shrink
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)  # fmt: skip
def test_any_conversion_keeps_what_is_denoted(cases) -> None:
    check(cases)
