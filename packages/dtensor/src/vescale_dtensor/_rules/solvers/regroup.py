"""Carries a cut of one dim through a view: pure geometry.

A view lines up runs of input dims with runs of output dims of equal product
(`groups_of`); only inside such a group do elements change dims. There, in the
row-major order of the group, a cut of dim d is a `Comb`: `blocks` equal blocks one
after the other, in each of which rank r holds one span of `spans[r]` elements.

    dim d of sizes ins, cut into g groups  ->  prod(ins[:d]) * g blocks,
                                               spans of chunk[r] * prod(ins[d + 1:])

The same comb is a cut of output dim j when the dims before j make out a whole number
of blocks each, and the dims after j a whole part of every span. What is cut into one
block by torch.chunk's sizes is a plain shard, into several an interleaved one, and
one block of other sizes is ragged. The local elements are then the same on both
sides, in the same order, so that a local reshape is all there is to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..._layouts.region import Ranges, chunks, cut, cut_sizes
from ..._layouts.state import State, sharded


@dataclass(frozen=True, slots=True)
class Group:
    """Input dims and output dims of equal product."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]

    @property
    def reverse(self) -> Group:
        return Group(self.outs, self.ins)


@dataclass(frozen=True, slots=True)
class Comb:
    """`blocks` equal blocks, in each of which rank r holds a span of `spans[r]` elements, in rank order."""

    blocks: int
    spans: tuple[int, ...]
    order: tuple[int, ...] | None = None
    parts: tuple[Ranges, ...] = ()
    """Owners of a rank's span that lies in several parts, and each rank's ranges in a block."""


def groups_of(before: tuple[int, ...], after: tuple[int, ...]) -> list[Group]:
    """The finest groups, from the left. Shapes have the same number of elements, which is not zero."""
    groups: list[Group] = []
    i = j = 0
    while i < len(before) and j < len(after):
        ins, outs = [i], [j]
        left, right = before[i], after[j]
        while left != right:
            if left < right:
                i += 1
                ins.append(i)
                left *= before[i]
            else:
                j += 1
                outs.append(j)
                right *= after[j]
        groups.append(Group(tuple(ins), tuple(outs)))
        i, j = i + 1, j + 1
    rest = Group(tuple(range(i, len(before))), tuple(range(j, len(after))))  # dims of size 1
    if rest.ins or rest.outs:
        last = groups.pop() if groups else Group((), ())
        groups.append(Group(last.ins + rest.ins, last.outs + rest.outs))
    return groups


def combs_of(state: State, at: int, sizes: tuple[int, ...], count: int) -> list[Comb]:
    """Describes the cut of `state` of dim number `at` of a group of local `sizes`; equal descriptions, the finest
    first."""
    inner = prod(sizes[at + 1 :])
    spans = tuple(size // state.groups * inner for size in cut_sizes(state, sizes[at], count))
    blocks = prod(sizes[:at]) * state.groups
    if state.order is not None:
        return [Comb(blocks, spans, state.order, _ordered(state.order, sizes[at] // state.groups, inner, count))]
    found = [Comb(blocks, spans)]
    if blocks > 1 and sum(span > 0 for span in spans) == 1:  # one rank holds all: blocks have no boundaries
        found.append(Comb(1, tuple(span * blocks for span in spans)))
    return found


def states_of(comb: Comb, at: int, sizes: tuple[int, ...]) -> list[State]:
    """States of dim number `at` of a group of local `sizes` that are this comb; the dim is named 0. At most one."""
    outer, inner = prod(sizes[:at]), prod(sizes[at + 1 :])
    if comb.blocks % outer or any(span % inner for span in comb.spans):
        return []
    groups = comb.blocks // outer
    if sizes[at] % groups:
        return []
    if comb.order is not None:
        ranges = _ordered(comb.order, sizes[at] // groups, inner, len(comb.spans))
        return [sharded(0, groups, order=comb.order)] if ranges == comb.parts else []
    lengths = tuple(span // inner for span in comb.spans)
    if lengths == tuple(chunks(sizes[at] // groups, len(lengths))):
        return [sharded(0, groups)]
    return [sharded(0, 1, lengths)] if groups == 1 else []


def _ordered(order: tuple[int, ...], size: int, inner: int, count: int) -> tuple[Ranges, ...]:
    """Returns each rank's part of `size` indices of `inner` elements each, in elements."""
    cuts = cut(sharded(0, order=order), size, count)
    return tuple(tuple((start * inner, stop * inner) for start, stop in ranges) for ranges in cuts)


def carry_cut(
    state: State, group: Group, sizes: list[tuple[tuple[int, ...], tuple[int, ...]]], count: int
) -> State | None:
    """`state`, which cuts an input dim of `group`, as a cut of one of its output dims, or None.

    sizes: the local (input, output) sizes of the group's dims, for every coordinate of
    the axes before: the answer must be right at all of them.
    """
    at = group.ins.index(state.dim)
    sizes = [(ins, outs) for ins, outs in sizes if prod(ins)]
    found: list[tuple[tuple, State]] = []
    for j, dim in enumerate(group.outs):
        answers = [
            {one for comb in combs_of(state, at, ins, count) for one in states_of(comb, j, outs)}
            for ins, outs in sizes
        ]
        for one in set.intersection(*answers):
            rank = (one.units is not None, one.groups > 1, sizes[0][1][j] == 1, j)
            found.append((rank, one.at(dim)))
    return min(found, key=lambda pair: pair[0])[1] if found else None
