"""Plans conversions and their cost. Pure.

A conversion moves a tensor from one layout to another of the same mesh and shape.
It is a sequence of steps, each changing the state of one axis; its backward is the
conversion from the target's gradient layout to the source's, itself one of the
table below (design section 3):

    step        forward          backward is the step   which is
    I -> R      nothing          P -> I                 all-reduce
    R -> I      nothing          I -> P                 keep on first
    I -> S      slice            S -> I                 all-gather
    R -> S      slice            S -> P                 pad
    P -> I      all-reduce       I -> R                 nothing
    P -> R      all-reduce       P -> R                 all-reduce
    P -> S      reduce-scatter   S -> R                 all-gather
    S -> R      all-gather       P -> S                 reduce-scatter
    S -> I      all-gather       I -> S                 slice
    S -> S'     all-to-all       S' -> S                all-to-all
    I -> P      keep on first    R -> I                 nothing
    R -> P      keep on first    R -> P                 keep on first
    S -> P      pad              R -> S                 slice

A flat shard (F) has the steps of S to and from I, R and P, and all-to-all between two
flat cuts of one axis; between S and F the way leads through R. It is cut last, so it is
there only while no other axis starts or stops sharding.

The cheapest sequence is found by uniform-cost search over the states of all axes
(few: at most four per axis), cost being the elements a rank receives, forward and
backward. A dim sharded by several axes nests, so an axis may only start or stop
sharding a dim while no axis to its right shards it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from .._layouts.layout import Layout
from .._layouts.state import INVARIANT, PARTIAL, REPLICATE, State

STEP = {
    ("I", "R"): "nothing",
    ("R", "I"): "nothing",
    ("I", "S"): "slice",
    ("R", "S"): "slice",
    ("P", "I"): "all_reduce",
    ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("S", "R"): "all_gather",
    ("S", "I"): "all_gather",
    ("S", "S"): "all_to_all",
    ("I", "P"): "keep_on_first",
    ("R", "P"): "keep_on_first",
    ("S", "P"): "pad",
    ("I", "F"): "slice",
    ("R", "F"): "slice",
    ("P", "F"): "reduce_scatter",
    ("F", "R"): "all_gather",
    ("F", "I"): "all_gather",
    ("F", "F"): "all_to_all",
    ("F", "P"): "pad",
}
COLLECTIVES = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all"})
# Elements received per rank, in units of the tensor with this axis whole, for n ranks.
_RECEIVED = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n**2,
}


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One axis changes state: what is done, and the layouts before and after. Compared by identity."""

    kind: str
    axis: int
    before: Layout
    after: Layout

    @property
    def elements(self) -> float:
        """Elements that a rank receives (even shards assumed)."""
        return step_elements(self.kind, self.axis, self.before)


def step_elements(kind: str, axis: int, before: Layout) -> float:
    """Elements received per rank by a step of `kind` over `axis` from layout `before`."""
    received = _RECEIVED.get(kind)
    if received is None:
        return 0.0
    mesh = before.mesh
    others = prod(mesh.sizes[a] for a, s in enumerate(before.states) if s.kind in "SF" and a != axis)
    return received(mesh.sizes[axis]) * before.numel / others


def axis_cost(source: State, target: State, count: int, numel: float) -> tuple[float, float]:
    """(forward, backward) elements received when one axis of `count` ranks goes from `source` to `target`.

    `numel` is the size of the tensor with this axis whole. What rules choose by.
    """

    def one_way(a: State, b: State) -> float:
        if a is b:
            return 0.0
        received = _RECEIVED.get(STEP[a.kind, b.kind])
        return received(count) * numel if received else 0.0

    return one_way(source, target), one_way(target.gradient, source.gradient)


@lru_cache(maxsize=65536)
def plan(source: Layout, target: Layout) -> tuple[Step, ...]:
    """The cheapest steps from `source` to `target` (same mesh, same shape). Empty when they are equal."""
    source, target = source.base, target.base
    if source is target:
        return ()
    choices = [
        {source.states[axis], target.states[axis], INVARIANT, REPLICATE}
        | ({PARTIAL} if PARTIAL in (source.states[axis], target.states[axis]) else set())
        for axis in range(source.mesh.ndim)
    ]
    tick = 0  # a tie goes to the path found first, on every rank alike
    frontier: list[tuple[float, int, int, Layout, tuple[Step, ...]]] = [(0.0, 0, tick, source, ())]
    done: set[Layout] = set()
    while frontier:
        cost, length, _, layout, steps = heapq.heappop(frontier)
        if layout is target:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for axis, states in enumerate(choices):
            here = layout.states[axis]
            for state in sorted(states, key=repr):
                if state is here or not _may_change(layout, axis, here, state):
                    continue
                after = layout.with_states(layout.states[:axis] + (state,) + layout.states[axis + 1 :])
                kind = STEP.get((here.kind, state.kind))
                if kind is None or after in done:
                    continue
                back = STEP.get((state.gradient.kind, here.gradient.kind), "nothing")
                if state.gradient is here.gradient:
                    back = "nothing"
                price = step_elements(kind, axis, layout) + step_elements(back, axis, after)
                tick += 1
                entry = (cost + price, length + 1, tick, after, (*steps, Step(kind, axis, layout, after)))
                heapq.heappush(frontier, entry)
    raise AssertionError(f"no conversion from {source!r} to {target!r}")


def _may_change(layout: Layout, axis: int, here: State, state: State) -> bool:
    """An axis starts or stops sharding a dim only while nothing to its right shards that dim, and none is flat."""
    if layout.flat_axis not in (None, axis) and (here.kind in "SF" or state.kind in "SF"):
        return False
    dims = {s.dim for s in (here, state) if s.kind == "S"}
    return not any(s.kind == "S" and s.dim in dims for s in layout.states[axis + 1 :])


def communicates(source: Layout, target: Layout) -> bool:
    """True if the conversion's forward needs any collective."""
    return any(step.kind in COLLECTIVES for step in plan(source, target))


def is_alias(source: Layout, target: Layout) -> bool:
    """True if the conversion leaves the local values as they are (I <-> R)."""
    return all(step.kind == "nothing" for step in plan(source, target))
