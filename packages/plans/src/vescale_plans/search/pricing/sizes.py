"""Sizes: what cost and memory need to know of a structure at one tensor-parallel degree, counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..structure import Structure
from ..tensor_plan import split_parameters


@dataclass(frozen=True)
class Contraction:
    """One rank's share of a contraction: features of its input and result, and experts it is one of (0: none), of
    which each position meets `chosen`."""

    inward: float
    outward: float
    experts: int
    chosen: int = 0


@dataclass(frozen=True)
class Branch:
    """What lies between the stream and the stream again.

    Arguments:
        stream: width of the stream.
        features: of the sink, whole.
        inner: features of the sink and of all sources, whole.
        split: whether the tensor axis splits it.
        positions_meet: see `Group`.
        chosen: experts that each position meets in it; 0 where it is no stack of experts.
    """

    stream: int
    features: int
    inner: int
    split: bool
    positions_meet: bool
    chosen: int = 0


@dataclass(frozen=True)
class Sizes:
    """A structure, or a part of one, at one degree.

    Arguments:
        tp: the degree.
        whole, split: numbers in parameters that stay whole, and that the axis splits; tied ones once.
        experts: of these, the numbers that one rank of the tensor axis holds in stacks of experts.
        contractions, branches: how often each occurs.
        entries: of the largest head.
        blocks: repeated blocks, 1 at least.
    """

    tp: int
    whole: int
    split: int
    experts: float
    contractions: Mapping[Contraction, int]
    branches: Mapping[Branch, int]
    entries: int
    blocks: int

    @property
    def held(self) -> float:
        """Numbers that one rank of the tensor axis holds."""
        return self.whole + self.split / self.tp

    def spread(self, ranks: int) -> float:
        """The same, with the experts spread over `ranks`."""
        return self.held - self.experts * (1 - 1 / ranks)


def sizes_of(structure: Structure, tp: int) -> Sizes:
    """Counts `structure` with its groups split `tp` ways."""
    return _counted(structure, tp, dict.fromkeys(structure.shapes, 0), [sum(len(b.names) for b in structure.blocks)])[0]


def parts_of(structure: Structure, tp: int) -> tuple[Sizes, ...]:
    """The same by parts, one per repeated block; what lies around blocks belongs to the one before, or to the first."""
    numbers = {name: at for at, name in enumerate(structure.block_names)}
    of, part = {}, 0
    for name in structure.shapes:  # in the order of registration, in which pipelines are cut too
        pieces = name.split(".")
        inside = [numbers.get(".".join(pieces[:size]), 0) for size in range(1, len(pieces))]
        part = max(part, *inside) if inside else part
        of[name] = part
    return _counted(structure, tp, of, [int(bool(numbers))] * max(1, len(numbers)))


def _counted(structure: Structure, tp: int, of: Mapping[str, int], blocks: Sequence[int]) -> tuple[Sizes, ...]:
    """Per part, with `of` telling the part of each parameter."""
    split = split_parameters(structure, tp)
    again = {name for names in structure.tied for name in names[1:]}
    stacked = {name for one in structure.experts for name in one.parameters}
    sinks = {group.sink for group in structure.groups}
    heads = {one.parameter for one in structure.heads}
    chosen = {name: one.chosen for one in structure.experts for name in one.parameters}
    parts = range(len(blocks))
    whole, cut, experts, entries = ([0] * len(blocks) for _ in range(4))
    contractions: list[Counter[Contraction]] = [Counter() for _ in parts]
    branches: list[Counter[Branch]] = [Counter() for _ in parts]
    for name, shape in structure.shapes.items():
        if name not in again:
            count = prod(shape)
            (cut if name in split else whole)[of[name]] += count
            if name in stacked:
                experts[of[name]] += count / tp if name in split else count
    for one in structure.matrices:
        inward = one.inward / tp if one.parameter in split and one.parameter in sinks else one.inward
        outward = one.outward / tp if one.parameter in split and one.parameter not in sinks else one.outward
        part = of[one.parameter]
        met = chosen.get(one.parameter, int(one.experts > 0))
        contractions[part][Contraction(inward, outward, one.experts, met)] += 1
        if one.parameter in heads:
            entries[part] = max(entries[part], one.outward)
    for group in structure.groups:
        width = prod(structure.shapes[group.sink]) // max(1, group.features * max(1, group.experts))
        inner = group.features + sum(source.size for source in group.sources)
        met = chosen.get(group.sink, int(group.experts > 0))
        branch = Branch(width, group.features, inner, group.sink in split, group.positions_meet, met)
        branches[of[group.sink]][branch] += 1
    return tuple(
        Sizes(tp, whole[at], cut[at], experts[at], contractions[at], branches[at], entries[at], max(1, blocks[at]))
        for at in parts
    )
