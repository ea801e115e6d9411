"""Data of probing: a model's contractions, the taints put into them, and where these arrived.

From these it follows which contractions may be split together: sources by their out features, and the sink by its in
features (`paired`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ..structure import Blocks
from .operands import Features

Key = tuple[str, int]
"""A call: the parameter, and the how-manieth call with it in one forward (0 for all calls of a stack)."""


@dataclass
class Call:
    """One contraction, as one forward showed it.

    Arguments:
        key: see `Key`.
        order: of its first call.
        lookup, scattered: see `Form`; `stack` for a parameter that holds one matrix per expert.
        inward, outward: what its in and out features are of the parameter.
        bias: name of the parameter that is added.
        outer: the batch dim of the flattened rows lies inside so many rows; None if rows follow no batch dim.
        path: modules that were running, outermost first.
        untouched: nothing that was followed arrived: what goes in is made of no number of the sample's.
        repeated: a stack that one forward contracted several times, an expert at a time.
    """

    key: Key
    order: int
    in_features: int
    out_features: int
    lookup: bool
    scattered: bool
    stack: bool
    convolution: bool
    inward: Features | None
    outward: Features
    bias: str | None
    path: tuple[str, ...]
    outer: int | None = None
    coupled: bool = False
    untouched: bool = False
    repeated: bool = False


@dataclass(frozen=True)
class Test:
    """A taint: some out features of a call (`features`), or all of them at one position (`token`)."""

    key: Key
    features: Tensor | None
    token: int | None = None


@dataclass
class Reached:
    """Arrivals of one forward's taints.

    Arguments:
        features: call -> bool [rows, in features].
        tokens: call -> bool [rows, positions].
        selectors: bool [rows], whether the taint met a topk, argmax or sort.
    """

    features: dict[Key, Tensor] = field(default_factory=dict)
    tokens: dict[Key, Tensor] = field(default_factory=dict)
    selectors: Tensor | None = None


@dataclass(frozen=True)
class Influence:
    """Reach of a contraction's out features in another one's in features.

    Arguments:
        unit: neighbouring out features that were tainted together.
        reach: bool [out features / unit, in features].
    """

    unit: int
    reach: Tensor

    @cached_property
    def is_mixing(self) -> bool:
        """True if what lies between sees all features together: every unit that reaches any reaches the same."""
        hit = self.reach[self.reach.any(1)]
        return bool((hit == hit[:1]).all()) and (len(hit) > 1 or bool(hit.all()))


@dataclass
class Findings:
    """All that was seen of a model.

    Arguments:
        calls: in order.
        influences: source -> sink -> Influence.
        bridged: the same with norms handing nothing on, for sources that mix otherwise.
        enclosed: sinks that mix all that they are reached by, and whose sources reach nothing else.
        vectors: parameter of one dim -> sink -> what its entries reach; where it reaches sinks of groups alone.
        routers: calls whose result something was selected by.
        chosen: of so many scores, so many were selected.
        inputs, outputs: module that takes, or gives, activations -> the dim of positions in the first of them; None if
            it has none.
        token_wise: calls of the residual stream whose position s reaches position s alone.
        chains: repeated blocks.
        like: parameter or module in a block -> its like in all blocks of that kind, itself among them; what a source
            reaches was seen in full in the first of these.
        coupled: contractions whose rows depend on other rows of the batch.
        tied: parameters that are one, as tuples of names.
    """

    shapes: dict[str, tuple[int, ...]]
    calls: dict[Key, Call]
    influences: dict[Key, dict[Key, Influence]] = field(default_factory=dict)
    bridged: dict[Key, dict[Key, Influence]] = field(default_factory=dict)
    vectors: dict[str, dict[Key, Influence]] = field(default_factory=dict)
    enclosed: set[Key] = field(default_factory=set)
    routers: set[Key] = field(default_factory=set)
    chosen: dict[int, int] = field(default_factory=dict)
    inputs: dict[str, int | None] = field(default_factory=dict)
    outputs: dict[str, int | None] = field(default_factory=dict)
    token_wise: dict[Key, bool] = field(default_factory=dict)
    chains: tuple[Blocks, ...] = ()
    like: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    coupled: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()

    def is_later(self, key: Key) -> bool:
        """True if it is of a block that has a like before it."""
        return self.like.get(key[0], key)[0] != key[0]


def paired(found: Findings) -> dict[Key, dict[Key, Influence]]:
    """sink -> the sources that may be split with it.

    A source qualifies if everything it reaches is a sink that it reaches feature by feature; a sink if a source
    that qualifies reaches it. In a chain the first pair wins: what is split by its in features gives sums, and those
    are whole before they are split again.
    """
    influences = {key: dict(sinks) for key, sinks in found.influences.items()}
    for key, sinks in found.bridged.items():
        if any(not one.is_mixing for one in sinks.values()):
            influences[key] = dict(sinks)
    order = {key: call.order for key, call in found.calls.items()}
    sinks = {sink for reached in influences.values() for sink, one in reached.items() if not one.is_mixing}
    while True:
        pairs: dict[Key, dict[Key, Influence]] = {}
        for sink in sorted(sinks, key=order.__getitem__):
            for key in sorted(influences, key=order.__getitem__):
                reached = influences[key]
                one = reached.get(sink)
                if one is None or one.is_mixing or key in pairs or order[key] >= order[sink] or set(reached) - sinks:
                    continue
                if any(other.is_mixing for other in reached.values()):
                    continue
                pairs.setdefault(sink, {})[key] = one
        tables = {key for key, call in found.calls.items() if call.lookup}
        pairs = {sink: sources for sink, sources in pairs.items() if not sources.keys() <= tables}
        bridged = {s for s, sources in pairs.items() if all(key in found.bridged for key in sources)} - found.enclosed
        pairs = {sink: sources for sink, sources in pairs.items() if sink not in bridged}
        if set(pairs) == sinks:
            return pairs
        sinks = set(pairs)
