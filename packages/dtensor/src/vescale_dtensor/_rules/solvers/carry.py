"""One operand whose cuts are carried through to the outputs: the solver for views.

Where `_dispatch/signature.py` names dims, some functions change them: a view, a split. Such a
rule says, axis by axis and from the left, what becomes of a cut. A cut that does not
carry over is exchanged for the cheapest one that does: a cut of the same or another
dim (an all-to-all), else none (an all-gather).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

from ..._conversions.conversion import axis_cost
from ..._dispatch.signature import unsharded_numel
from ..._layouts.layout import Layout, layout_of
from ..._layouts.state import INVARIANT, State, sharded
from ..registry import Call, Decision

# From an axis, its state, and the layouts of input and outputs as the axes before cut them: the outputs' states.
Through = Callable[[int, State, Layout, Sequence[Layout]], "tuple[State, ...] | None"]
# From an axis and those layouts: pairs of an input state and output states, the preferred first.
Offers = Callable[[int, State, Layout, Sequence[Layout]], "Iterable[tuple[State, tuple[State, ...]]]"]


def carry(
    call: Call,
    shapes: Sequence[tuple[int, ...]],
    through: Through,
    *,
    offers: Offers | None = None,
    local: Callable[[tuple[Layout, ...]], Callable | None] | None = None,
    single: bool = False,
    why: Callable[[Layout, int], tuple] | None = None,
) -> Decision | None:
    """The decision for a function of one tensor that is linear in it.

    Arguments:
        shapes: of the outputs.
        through: what becomes of a sharded axis, None if it cannot stay.
        offers: more cuts to change to, besides plain ones of the other dims.
        local: from the outputs' layouts, the function to run.
        why: from the input's layout and the first axis that could not stay, the
            explanation that `strict()` gives.
    """
    operand, mesh = call.operands[0], call.mesh
    rest = [INVARIANT] * mesh.ndim
    states: list[State] = []
    outs: list[list[State]] = [[] for _ in shapes]
    stuck = None
    for axis, state in enumerate(operand.states):
        source = layout_of(mesh, states + rest[axis:], operand.shape)
        results = [layout_of(mesh, out + rest[axis:], shape) for out, shape in zip(outs, shapes)]
        kept = through(axis, state, source, results) if state.is_sharded else (state,) * len(shapes)
        if kept is None:
            stuck = axis if stuck is None else stuck
            state, kept = _exchange(operand.layout, axis, source, results, through, offers)
        states.append(state)
        for out, one in zip(outs, kept):
            out.append(one)
    target = layout_of(mesh, states, operand.shape)
    layouts = tuple(layout_of(mesh, out, shape) for out, shape in zip(outs, shapes))
    if not all(layout.is_exact for layout in (target, *layouts)):
        return None
    return Decision(
        targets=(None if target is operand.layout else target,),
        out=layouts[0] if single else layouts,
        run=local(layouts) if local is not None else None,
        explanation=why(operand.layout, stuck) if why is not None and stuck is not None else None,
    )


def _exchange(layout, axis, source, results, through, offers) -> tuple[State, tuple[State, ...]]:
    """The cheapest (input state, output states) for an axis whose cut cannot stay. Dims that later axes cut are
    left to them: their cuts need not fit into another."""
    state, count = layout.states[axis], layout.mesh.sizes[axis]
    taken = {later.dim for later in layout.states[axis + 1 :] if later.is_sharded}
    choices = list(offers(axis, state, source, results)) if offers is not None else []
    choices = [choice for choice in choices if choice[0].dim not in taken]
    for dim, size in enumerate(source.shape):
        if size >= count and dim not in taken:
            kept = through(axis, sharded(dim), source, results)
            if kept is not None:
                choices.append((sharded(dim), kept))
    choices.append((INVARIANT, (INVARIANT,) * len(results)))
    numel = unsharded_numel(layout, axis)

    def cost(choice: tuple) -> tuple:
        target = choice[0]
        realigned = target.dim == state.dim and target.groups == 1
        uneven = target.is_sharded and (target.units is not None or source.shape[target.dim] % count != 0)
        return (*axis_cost(state, target, count, numel), not realigned, uneven)

    return min(choices, key=cost)  # the first of the cheapest


def sizes_before(axis: int, layouts: Sequence[Layout]) -> list[tuple[tuple[int, ...], ...]]:
    """The distinct local shapes of `layouts` over all coordinates of the axes before `axis`."""
    mesh = layouts[0].mesh
    cutting = [any(layout.states[a].is_sharded for layout in layouts) for a in range(axis)]
    ranges = [range(mesh.sizes[a]) if cutting[a] else (0,) for a in range(axis)]
    found = {}
    for coordinate in product(*ranges, *[(0,)] * (mesh.ndim - axis)):
        found[tuple(layout.shape_at(coordinate) for layout in layouts)] = None
    return list(found)
