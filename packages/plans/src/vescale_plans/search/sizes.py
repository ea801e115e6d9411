"""Sizes: what cost and memory need to know of a structure at one tensor-parallel degree, counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from .structure import Structure
from .tensor_plan import split_parameters


@dataclass(frozen=True)
class Contraction:
    """One rank's share of a contraction: features of its input and result, and experts it is one of (0: none)."""

    inward: float
    outward: float
    experts: int


@dataclass(frozen=True)
class Branch:
    """What lies between the stream and the stream again.

    Arguments:
        stream: width of the stream.
        features: of the sink, whole.
        inner: features of the sink and of all sources, whole.
        split: whether the tensor axis splits it.
        positions_meet: see `Group`.
    """

    stream: int
    features: int
    inner: int
    split: bool
    positions_meet: bool


@dataclass(frozen=True)
class Sizes:
    """A structure at one degree.

    Arguments:
        tp: the degree.
        whole, split: numbers in parameters that stay whole, and that the axis splits; tied ones once.
        contractions, branches: how often each occurs.
        entries: of the largest head.
        blocks: repeated blocks, 1 at least.
    """

    tp: int
    whole: int
    split: int
    contractions: Mapping[Contraction, int]
    branches: Mapping[Branch, int]
    entries: int
    blocks: int

    @property
    def held(self) -> float:
        """Numbers that one rank of the tensor axis holds."""
        return self.whole + self.split / self.tp


def sizes_of(structure: Structure, tp: int) -> Sizes:
    """Counts `structure` with its groups split `tp` ways."""
    split = split_parameters(structure, tp)
    again = {name for names in structure.tied for name in names[1:]}
    counts = {name: prod(shape) for name, shape in structure.shapes.items() if name not in again}
    cut = sum(count for name, count in counts.items() if name in split)
    sinks = {group.sink for group in structure.groups}
    contractions: Counter[Contraction] = Counter()
    for one in structure.matrices:
        inward = one.inward / tp if one.parameter in split and one.parameter in sinks else one.inward
        outward = one.outward / tp if one.parameter in split and one.parameter not in sinks else one.outward
        contractions[Contraction(inward, outward, one.experts)] += 1
    branches: Counter[Branch] = Counter()
    for group in structure.groups:
        width = prod(structure.shapes[group.sink]) // max(1, group.features * max(1, group.experts))
        inner = group.features + sum(source.size for source in group.sources)
        branches[Branch(width, group.features, inner, group.sink in split, group.positions_meet)] += 1
    heads = {one.parameter for one in structure.heads}
    return Sizes(
        tp,
        sum(counts.values()) - cut,
        cut,
        contractions,
        branches,
        max((one.outward for one in structure.matrices if one.parameter in heads), default=0),
        max(1, sum(len(one.names) for one in structure.blocks)),
    )
