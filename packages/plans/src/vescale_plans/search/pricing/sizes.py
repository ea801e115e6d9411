"""Sizes: what cost and memory need to know of a structure at one tensor-parallel degree, counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ..held import Amount, Block, Inside, summed
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
    """A branch of the residual stream, from the stream back to it.

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
class Kept:
    """Memory that a step of a structure, or of a part of one, holds on to.

    Arguments:
        kept, streams: of all blocks together: for backward, and where they are computed again.
        first, last: blocks.
        loss, tail: see `Holding`; of a part without the last block `loss` is empty.
        inside: modules by their names in a block, of all blocks together.
    """

    kept: Amount
    streams: Amount
    first: Block
    last: Block
    loss: tuple[Amount, ...]
    tail: tuple[Amount, ...]
    inside: Mapping[str, Inside] = field(default_factory=dict)


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
        outside: numbers that one rank of the tensor axis holds in no block.
        largest: numbers that it holds of the largest parameter.
        held_back: bytes of a number -> what a step holds on to, see `Kept`; empty if that is not known.
        inside: contractions and branches, and no more, of the modules that may be computed again by themselves.
        within: the same of whole blocks, which is all but a head.
    """

    tp: int
    whole: int
    split: int
    experts: float
    contractions: Mapping[Contraction, int]
    branches: Mapping[Branch, int]
    entries: int
    blocks: int
    outside: float = 0.0
    largest: int = 0
    held_back: Mapping[int, Kept] = field(default_factory=dict)
    inside: Mapping[str, Sizes] = field(default_factory=dict)
    within: Sizes | None = None

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


def parts_of(structure: Structure, tp: int, staged: bool = False) -> tuple[Sizes, ...]:
    """The same by parts, one per repeated block; what lies around blocks belongs to the one before, or to the first.
    `staged`: parameters of several names are held in each part that has one, as a pipeline's stages hold them."""
    numbers, of, part = inside_of(structure), {}, 0
    for name in structure.shapes:  # in the order of registration, in which pipelines are cut too
        part = max(part, numbers.get(name, 0))
        of[name] = part
    return _counted(structure, tp, of, [int(bool(numbers))] * max(1, len(structure.block_names)), staged)


def _ends(structure: Structure, of: Mapping[str, int], last: int) -> dict[str, int]:
    """Head that is a table too -> the part that computes with it: that of its last name, or of all if it has one."""
    tables = {one.parameter for one in structure.lookups}
    alike = {names[0]: names for names in structure.tied}
    return {
        one.parameter: max(of[name] for name in alike[one.parameter]) if one.parameter in alike else last
        for one in structure.heads
        if one.parameter in tables
    }


def inside_of(structure: Structure) -> dict[str, int]:
    """Parameter -> the place of the block that it is in; not those that are in none."""
    places = {name: at for at, name in enumerate(structure.block_names)}
    found = {}
    for name in structure.shapes:
        end = name.find(".")
        while end >= 0:
            if (at := places.get(name[:end])) is not None:
                found[name] = at
            end = name.find(".", end + 1)
    return found


def _counted(
    structure: Structure, tp: int, of: Mapping[str, int], blocks: Sequence[int], staged: bool = False
) -> tuple[Sizes, ...]:
    """Per part, with `of` telling the part of each parameter."""
    split = split_parameters(structure, tp)
    ends = _ends(structure, of, len(blocks) - 1)
    stacked = {name for one in structure.experts for name in one.parameters}
    sinks = {group.sink for group in structure.groups}
    heads = {one.parameter for one in structure.heads}
    chosen = {name: one.chosen for one in structure.experts for name in one.parameters}
    parts = range(len(blocks))
    totals: list[Counter[str]] = [Counter() for _ in parts]  # by the names of fields
    inside = inside_of(structure)
    nested = {parameter: name for name, parameters in structure.inside.items() for parameter in parameters}
    whole, within = ([_bare(tp) for _ in parts] for _ in range(2))
    again = [{name: _bare(tp) for name in structure.inside} for _ in parts]

    def into(parameter: str, part: int) -> Iterator[Sizes]:
        """Yields all that has a parameter of a part."""
        yield whole[part]
        yield from (within[part],) * (parameter in inside)
        yield from (again[part][nested[parameter]],) if parameter in nested else ()

    for name, part in _held(structure, of, ends, staged):
        count, total = prod(structure.shapes[name]), totals[part]
        held = count / tp if name in split else count
        total["split" if name in split else "whole"] += count
        total["largest"] = max(total["largest"], int(held))
        total["outside"] += held * (name not in inside)
        total["experts"] += held * (name in stacked)
    for one in structure.matrices:
        inward = one.inward / tp if one.parameter in split and one.parameter in sinks else one.inward
        outward = one.outward / tp if one.parameter in split and one.parameter not in sinks else one.outward
        part = ends.get(one.parameter, of[one.parameter])
        met = chosen.get(one.parameter, int(one.experts > 0))
        contraction = Contraction(inward, outward, one.experts, met)
        for sizes in into(one.parameter, part):
            sizes.contractions[contraction] += 1
        if one.parameter in heads:
            totals[part]["entries"] = max(totals[part]["entries"], one.outward)
    for group in structure.groups:
        width = prod(structure.shapes[group.sink]) // max(1, group.features * max(1, group.experts))
        inner = group.features + sum(source.size for source in group.sources)
        met = chosen.get(group.sink, int(group.experts > 0))
        branch = Branch(width, group.features, inner, group.sink in split, group.positions_meet, met)
        for sizes in into(group.sink, of[group.sink]):
            sizes.branches[branch] += 1
    back = _held_back(structure, len(blocks))
    return tuple(
        replace(
            whole[at], **totals[at], blocks=max(1, blocks[at]), held_back=back[at], inside=again[at], within=within[at]
        )
        for at in parts
    )


def _held(
    structure: Structure, of: Mapping[str, int], ends: Mapping[str, int], staged: bool
) -> Iterator[tuple[str, int]]:
    """Each parameter by its first name and the part that holds it, or all parts that do."""
    alike = {names[0]: names for names in structure.tied}
    others = {name for names in structure.tied for name in names[1:]}
    for name in structure.shapes:
        if name not in others:
            parts = {of[one] for one in alike.get(name, (name,))} | {ends.get(name, of[name])}
            yield from ((name, part) for part in (sorted(parts) if staged else [of[name]]))


def _bare(tp: int) -> Sizes:
    return Sizes(tp, 0, 0, 0, Counter(), Counter(), 0, 1)


def _held_back(structure: Structure, count: int) -> list[dict[int, Kept]]:
    """Per part; nothing if a part has no block."""
    names = structure.block_names
    parts: list[dict[int, Kept]] = [{} for _ in range(count)]
    for itemsize, holding in structure.holding.items():
        if not names or any(name not in holding.blocks for name in names):
            continue
        for at in range(count):
            own = [holding.blocks[name] for name in (names if count == 1 else names[at : at + 1])]
            is_last = at == count - 1
            loss = holding.loss if is_last else ()
            kept, streams = (summed(getattr(one, name) for one in own) for name in ("kept", "stream"))
            inside = {name: _together(own, name) for name in structure.inside}
            parts[at][itemsize] = Kept(kept, streams, own[0], own[-1], loss, holding.tail, inside)
    return parts


def _together(blocks: Sequence[Block], name: str) -> Inside:
    """Sums the modules of that name in all these blocks."""
    found = [block.inside[name] for block in blocks if name in block.inside]
    return Inside(summed(one.saved for one in found), summed(one.made for one in found))
