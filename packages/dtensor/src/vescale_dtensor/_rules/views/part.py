"""The cut that a run of indices has, of a dim that is cut in groups or in chunks that are dealt out.

    whole groups of InterleavedShard(d, groups)           as many groups; of one group Shard(d)
    whole chunks of InterleavedShard(d, groups, order)    the simplest cut that deals them out so
    every k-th index, where runs are multiples of k       the same cut
    what begins or ends within one                        no cut: it has to move
"""

from __future__ import annotations

from collections.abc import Sequence

from ..._layouts.layout import Layout
from ..._layouts.region import Ranges, cut
from ..._layouts.state import State, sharded
from .index_items import Item


def part_of(state: State, count: int, size: int, start: int, length: int) -> State | None:
    """The cut that `length` indices from `start` on have, of a dim of `size` that `state` cuts over `count` ranks; None
    where they begin or end within a group or a chunk, or where a rank that has chunks would be left without any."""
    if state.units is not None:
        return None
    order = None if state.order is None else state.order * state.groups
    whole = state.groups if order is None else len(order)
    unit = size // whole
    if not unit or unit * whole != size or start % unit or length % unit:
        return None
    if order is None:
        return sharded(state.dim, max(length // unit, 1))
    return _simplest(state.dim, count, order[start // unit : (start + length) // unit])


def _simplest(dim: int, count: int, order: tuple[int, ...]) -> State | None:
    """The cut with the fewest groups that deals out chunks so; by that order where no other does."""
    if set(order) != set(range(count)):
        return None
    for groups in range(1, len(order) // count + 1):
        part, rest = divmod(len(order), groups * count)
        if not rest and order == tuple(rank for rank in range(count) for _ in range(part)) * groups:
            return sharded(dim, groups)
    return sharded(dim, order=order)


def sliced(layout: Layout, items: Sequence[Item]) -> tuple[list[State], dict[int, slice]] | None:
    """Slices a layout's cuts by an index of one item per dim, if it takes runs of cut dims and each keeps one: returns
    the states of the result, and per such dim what this rank takes of its shard. None if a cut has to go, or a dim
    is cut by several axes, and where no cut dim is sliced."""
    taken = {item.dim: item for item in items if item.dim is not None and not item.is_full(layout.shape)}
    places = {item.dim: place for place, item in enumerate(item for item in items if not item.drop)}
    states: list[State] = []
    local: dict[int, slice] = {}
    for axis, state in enumerate(layout.states):
        item = taken.get(state.dim) if state.is_sharded else None
        if item is not None:
            if item.drop or not item.taken or len(layout.axes_of(item.dim)) > 1:
                return None
            count, size = layout.mesh.sizes[axis], layout.shape[item.dim]
            if item.taken.step != 1:
                if not _keeps_cut(state, count, size, item.taken):
                    return None
                local[item.dim] = slice(item.taken.start, None, item.taken.step)
                states.append(state.at(places[state.dim]))
                continue
            held = cut(state, size, count)[layout.mesh.coordinate[axis]]
            state = part_of(state, count, size, item.taken.start, len(item.taken))
            if state is None:
                return None
            before = _within(held, 0, item.taken.start)
            local[item.dim] = slice(before, before + _within(held, item.taken.start, item.taken.stop))
        states.append(state.at(places[state.dim]) if state.is_sharded else state)
    return (states, local) if local else None


def _keeps_cut(state: State, count: int, size: int, taken: range) -> bool:
    """True if every `taken.step`-th index of a dim is cut as the dim is: each run that a rank has is whole steps."""
    step = taken.step
    if state.units is not None or taken.start >= step or len(taken) * step != size:
        return False
    whole = cut(state, size, count)
    if any(low % step or high % step for held in whole for low, high in held):
        return False
    thinned = [[(low // step, high // step) for low, high in held] for held in whole]
    return [[tuple(one) for one in held] for held in cut(state, len(taken), count)] == thinned


def _within(held: Ranges, start: int, stop: int) -> int:
    """Returns how many indices of [start, stop) a rank has that holds these ranges."""
    return sum(max(0, min(high, stop) - max(low, start)) for low, high in held)
