"""Structure: what a model is made of, as far as parallelism cares, found without a look at any name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import gcd, prod

from vescale_dtensor import InterleavedShard, Placement, Shard

from .held import Holding

LEAST_SAVED = 0.02
"""Share of what a block keeps, from which on a module inside is worth computing again."""
USUAL_POSITIONS = 4096
"""Positions of a row at which modules are compared by what they keep."""
MOST_HEAVY = 2
"""Modules with matrices that are tried: attention and what follows it."""
Span = tuple[int, int]
"""First and past-the-last in feature of a sink."""


@cache
def cut_of(size: int, spans: tuple[Span, ...], features: int, degree: int, dim: int) -> Placement | None:
    """Cuts `size` features along `dim` in `degree` parts, so that every part reaches its own part of a sink's
    `features` alone: in one piece, in the fewest equal segments that are cut alike (queries, keys and values of as many
    heads), or in chunks that are dealt out (of fewer keys than queries); None if no such cut gives all as many.

    Arguments:
        spans: per unit of the features, what it reaches.
    """
    if features % degree or size % degree:
        return None
    owners = _owners(spans, features // degree)
    if owners is None or all(owner is None for owner in owners):
        return None
    units = len(owners)
    for groups in range(1, units // degree + 1):
        if units % (groups * degree) == 0 and size % (groups * degree) == 0:
            run, each = units // groups, units // groups // degree
            if all(owner in (None, (at % run) // each) for at, owner in enumerate(owners)):
                return Shard(dim) if groups == 1 else InterleavedShard(dim, groups)
    order = _dealt_out(owners, degree)
    return None if order is None or size % units else InterleavedShard(dim, 1, order)


def _owners(spans: tuple[Span, ...], part: int) -> list[int | None] | None:
    """Per unit the part of the sink that it reaches, None of one that reaches nothing, and so may go anywhere; None in
    place of them all if one reaches several."""
    owners: list[int | None] = []
    for start, stop in spans:
        if start < stop and start // part != (stop - 1) // part:
            return None
        owners.append(start // part if start < stop else None)
    return owners


def _dealt_out(owners: list[int | None], degree: int) -> tuple[int, ...] | None:
    """Returns the owner of each of the fewest equal chunks; None if parts have not as many units each."""
    known = next(owner for owner in owners if owner is not None)
    whose = [known := known if owner is None else owner for owner in owners]
    if any(whose.count(part) * degree != len(whose) for part in range(degree)):
        return None
    chunk = gcd(*(at for at in range(1, len(whose)) if whose[at] != whose[at - 1]), len(whose))
    return tuple(whose[::chunk])


@dataclass(frozen=True)
class Source:
    """A parameter whose out features flow into a sink without passing another contraction.

    Arguments:
        parameter: its name.
        bias: of the parameter added to the same features, if any.
        dim: of the parameter, that holds the out features.
        size: of that dim.
        unit: neighbouring features that were probed together.
        spans: per unit what it reaches of the sink's in features; each span is one atom or more.
        module: the innermost whose input is a whole activation that the parameter meets.
        by_norm: a norm over all features lies between; sharded, it costs an all-reduce of one number per position.
        companion: no weight of a contraction (an expert's bias, a number per head), split only where one is.
    """

    parameter: str
    bias: str | None
    dim: int
    size: int
    unit: int
    spans: tuple[Span, ...] = field(repr=False)
    module: str | None = None
    by_norm: bool = False
    companion: bool = False

    def cut(self, features: int, degree: int) -> Placement | None:
        """See `cut_of`."""
        return cut_of(self.size, self.spans, features, degree, self.dim)


@dataclass(frozen=True)
class Group:
    """A row-sharded parameter and the column-sharded ones that feed it: what Megatron splits together.

    Arguments:
        sink: the parameter whose in features are split.
        dim, features: of the sink, its in features, which lie along `dim`.
        bias: the sink's, which stays whole.
        sources: parameters whose out features may be split with them.
        kept: parameters that reach the sink too, and stay whole.
        module: the innermost whose output is a whole activation that the sink had a part in.
        experts: entries of the stack that sink and sources are, 0 if they are none.
        positions_meet: what enters at one position reaches others: attention.
    """

    sink: str
    dim: int
    features: int
    bias: str | None
    sources: tuple[Source, ...]
    kept: tuple[str, ...] = ()
    module: str | None = None
    experts: int = 0
    positions_meet: bool = False

    @property
    def atoms(self) -> int:
        """Parts that can never be cut: KV groups, neurons."""
        return len(self._merged([span for source in self.sources for span in source.spans]))

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees, from 2 on, by which the group can be split."""
        most = max((len(source.spans) for source in self.sources), default=1)
        return tuple(d for d in range(2, most + 1) if self.features % d == 0 and self.split(d))

    def split(self, degree: int) -> dict[str, tuple[Source, Placement]]:
        """Parameter -> how its out features are cut; empty if the group cannot be split by `degree`.

        A source of fewer features than the sink, which share it (keys and values of grouped heads), stays whole
        where it cannot be cut; with any other, the group does. A companion in parts of several sizes stays whole: its
        numbers are few, and what they are added to (a convolution's channels) may not come in such a cut.
        """
        placed: dict[str, tuple[Source, Placement]] = {}
        for source in self.sources:
            placement = source.cut(self.features, degree)
            if source.companion and getattr(placement, "order", None) is not None:
                continue
            if placement is not None:
                placed[source.parameter] = (source, placement)
            elif source.size >= self.features and not source.companion:
                return {}
        if all(source.companion for source, _ in placed.values()):
            return {}
        return placed

    def gathered(self, degree: int) -> dict[str, Source]:
        """Returns, if no cut keeps the parts apart (heads fewer than ranks, keys that all heads share packed with what
        each has of its own), sources whose weights can be split all the same, if what they give is gathered before it
        is used. Parameter -> source."""
        weights = [source for source in self.sources if not source.companion]
        sizes = [self.features, *(source.size for source in weights)]
        called = [
            source.module is not None and source.parameter.rpartition(".")[0] == source.module for source in weights
        ]
        if self.split(degree) or self.experts or any(size % degree for size in sizes) or not all(called):
            return {}
        return {source.parameter: source for source in weights}

    @property
    def gathered_degrees(self) -> tuple[int, ...]:
        """The degrees, from 2 on, by which it can be split if what its sources give is gathered."""
        return tuple(d for d in range(2, self.features + 1) if self.features % d == 0 and self.gathered(d))

    @property
    def is_dealt_out(self) -> bool:
        """True if a weight holds parts of several sizes: cut apart, these may be too few for the ranks, as the shared
        keys of grouped heads are, which would stay whole if held by themselves."""
        cuts = (placement for degree in self.degrees for _, placement in self.split(degree).values())
        return any(isinstance(one, InterleavedShard) and one.order is not None for one in cuts)

    @staticmethod
    def _merged(spans: list[Span]) -> list[Span]:
        merged: list[Span] = []
        for start, stop in sorted(set(spans)):
            if start >= stop:
                continue
            if merged and start < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return merged


@dataclass(frozen=True)
class Matrix:
    """A parameter that activations are contracted with, for the cost of it.

    Arguments:
        parameter: its name.
        inward, outward: features.
        experts: entries of a stack, of which each position meets some; 0 for a single matrix.
    """

    parameter: str
    inward: int
    outward: int
    experts: int = 0


@dataclass(frozen=True)
class Vocabulary:
    """A table that data look up, or a last contraction whose out features leave the model: split by entries.

    Arguments:
        parameter, bias: names.
        dim: of the parameter, that holds the entries.
        module: that calls it.
    """

    parameter: str
    bias: str | None
    dim: int
    module: str | None


@dataclass(frozen=True)
class Experts:
    """A stack of experts: parameters with one entry per expert along dim 0.

    Arguments:
        parameters: names.
        count: experts.
        module: that holds them.
        chosen: of them each position meets so many.
        spreads: `Plan.expert_axis` can spread them.
    """

    parameters: tuple[str, ...]
    count: int
    module: str | None
    chosen: int = 1
    spreads: bool = False


@dataclass(frozen=True)
class Blocks:
    """Repeated blocks in order.

    Arguments:
        names: of the modules.
        kinds: per block a number; equal numbers are equal structure.
        chained: each takes exactly what the one before returns, so that a pipeline can be cut between any two.
        called: modules with parameters that are called elsewhere among these blocks than they are registered ->
            the place of the last block before them, or 0.
        apart: why they are not chained, where they are not.
    """

    names: tuple[str, ...]
    kinds: tuple[int, ...]
    chained: bool = False
    called: tuple[tuple[str, int], ...] = ()
    apart: str = ""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Globs over the blocks' names."""
        return tuple(dict.fromkeys(re.sub(r"\d+$", "*", name) for name in self.names))


@dataclass(frozen=True)
class Structure:
    """Findings of probing. A value: no tensor, no module, equal for equal models.

    Arguments:
        shapes: parameter -> shape.
        modules: names of all modules.
        groups: see `Group`, in the order of calls.
        matrices: see `Matrix`.
        lookups, heads: see `Vocabulary`.
        experts: see `Experts`.
        routers: parameters whose result something is selected by.
        blocks: repeated blocks, outermost containers.
        tied: parameters with several names.
        coupled: parameters whose rows depend on other rows of the batch; empty if data parallelism is exact.
        mixers: modules that are known to mix positions without attention: convolutions, recurrent layers.
        position_dim: of the residual stream, along which sequence parallelism splits; None if a position reaches
            others outside the groups, or nothing is known of positions.
        stream_entries: modules whose output starts the residual stream.
        holding: bytes of a number -> what a step in such numbers holds on to; without those that the model could not
            be run in.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    modules: tuple[str, ...] = field(repr=False)
    groups: tuple[Group, ...]
    matrices: tuple[Matrix, ...] = field(default=(), repr=False)
    lookups: tuple[Vocabulary, ...] = ()
    heads: tuple[Vocabulary, ...] = ()
    experts: tuple[Experts, ...] = ()
    routers: tuple[str, ...] = ()
    blocks: tuple[Blocks, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    coupled: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ()
    position_dim: int | None = None
    stream_entries: tuple[str, ...] = ()
    holding: Mapping[int, Holding] = field(default_factory=dict, repr=False, compare=False)

    @property
    def parameters(self) -> int:
        """Numbers in all parameters together, tied ones once."""
        again = {name for names in self.tied for name in names[1:]}
        return sum(prod(shape) for name, shape in self.shapes.items() if name not in again)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that split every group that any degree splits, the most useful ones to try.

        A group whose parts of several sizes are in one weight is split by more degrees if it is gathered, and hinders
        none of these. Where none splits any so that its parts stay apart, those that split weights all the same: of a
        group that is gathered, else of the vocabulary.
        """
        alike = {(group.features, tuple((s.size, s.spans) for s in group.sources)): group for group in self.groups}
        useful = [
            {*group.degrees, *(group.gathered_degrees if group.is_dealt_out else ())}
            for group in alike.values()
            if group.degrees
        ]
        useful = useful or [found for group in alike.values() if (found := set(group.gathered_degrees))]
        if not useful:
            tables = (*self.lookups, *self.heads)
            useful = [{d for d in range(2, size + 1) if size % d == 0} for size in
                      {self.shapes[one.parameter][one.dim] for one in tables}]  # fmt: skip
        return tuple(sorted(set.intersection(*useful))) if useful else ()

    @property
    def cut_points(self) -> tuple[str, ...]:
        """Modules that may begin a pipeline stage."""
        return tuple(name for blocks in self.blocks if blocks.chained for name in blocks.names[1:])

    @cached_property
    def block_names(self) -> tuple[str, ...]:
        """All repeated blocks, in the order of registration."""
        names = {name for blocks in self.blocks for name in blocks.names}
        return tuple(name for name in self.modules if name in names)

    @cached_property
    def inside(self) -> Mapping[str, tuple[str, ...]]:
        """Modules that blocks call, by their names in a block, -> the matrices in them: those that keep enough to be
        worth computing again by themselves."""
        if not (held := self.holding.get(min(self.holding, default=0))):
            return {}
        blocks = [held.blocks[name] for name in self.block_names if name in held.blocks]
        saved: dict[str, float] = {}
        for block in blocks:
            for name, one in block.inside.items():
                saved[name] = saved.get(name, 0.0) + one.saved.at(USUAL_POSITIONS, USUAL_POSITIONS, 1)
        least = LEAST_SAVED * sum(block.kept.at(USUAL_POSITIONS, USUAL_POSITIONS, 1) for block in blocks)
        worth = sorted((-size, name) for name, size in saved.items() if size > least)
        within = {name: tuple(f"{block}.{name}." for block in self.block_names) for _, name in worth}
        return {
            name: tuple(one.parameter for one in self.matrices if one.parameter.startswith(starts))
            for name, starts in within.items()
        }

    @property
    def selections(self) -> tuple[tuple[str, ...], ...]:
        """Alternatives to whole blocks: all modules without a matrix (norms), and these with one that has."""
        light = tuple(sorted(name for name, matrices in self.inside.items() if not matrices))
        heavy = [name for name, matrices in self.inside.items() if matrices]
        return tuple(one for one in (light, *((*light, name) for name in heavy[:MOST_HEAVY])) if one)

    @property
    def expert_degrees(self) -> tuple[int, ...]:
        """Ranks, from 2 on, over which the experts can be spread evenly; none if any stack of them cannot be."""
        if not self.experts or not all(one.spreads for one in self.experts):
            return ()
        count = gcd(*(one.count for one in self.experts))
        return tuple(d for d in range(2, count + 1) if count % d == 0)
