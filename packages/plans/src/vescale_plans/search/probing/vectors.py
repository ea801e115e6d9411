"""Finds the reach of parameters' entries that are no contraction's: a gate, a decay, a number per head.

A parameter is the same in all rows of a batch, so that a forward has one test for each. Those of parameters whose sinks
are not the same share a forward, and entries are told apart by the digits of their numbers where these tell
(`digits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from .calls import Call, Influence, Key
from .digits import Digits

MOST_ALONE, UNITS = 64, 32
"""Up to so many entries each is tested for itself; beyond that they are in about as many units."""

Met = Callable[[Mapping[str, Tensor], frozenset[Key] | None], Mapping[Key, Tensor]]
"""Entries of parameters that are tainted -> what they reach, of all calls or some: bool [in features] per sink."""
Reach = dict[Key, Influence]


@dataclass(frozen=True)
class _Vector:
    """`units`: neighbouring entries that are tested together, [units, entries of each]; `sinks`: what all reach."""

    name: str
    units: Tensor
    sinks: frozenset[Key]


def vectors_reach(
    sizes: Mapping[str, int],
    whole: Mapping[str, tuple[str, ...]],
    calls: Mapping[Key, Call],
    grouped: frozenset[Key],
    met: Met,
) -> dict[str, Reach]:
    """Returns the reach of each parameter's entries, if they reach the sinks of groups alone (`grouped`): what reaches
    anything else is cut with none. Parameters that reach a sink with all entries alike are left out. `whole` has all
    parameters of modules that have no others, as norms are: what one reaches all do.

    Cost: a forward for each module, and for those of a share of disjoint sinks as many as their units' digits have
    values; where digits do not tell, one for each unit.
    """
    asked = []
    reached: dict[tuple[str, ...], frozenset[Key]] = {}
    for name, size in sizes.items():
        if size < 2:
            continue
        if (together := whole.get(name, (name,))) not in reached:
            reached[together] = frozenset(met({one: torch.arange(sizes[one]) for one in together}, None))
        sinks = reached[together]
        if sinks and sinks <= grouped:
            unit = 1 if size <= MOST_ALONE else size // gcd(size, UNITS)
            asked.append(_Vector(name, torch.arange(size).view(-1, unit), sinks))
    test = _Tests(calls, met)
    found = {one.name: reach for part in _disjoint(asked) for one, reach in test.by_digits(part)}
    rest = [one for one in asked if one.name not in found]
    found |= {one.name: reach for part in _disjoint(rest) for one, reach in test.each(part)}
    kept = {name for name, reach in found.items() if reach and not any(one.is_mixing for one in reach.values())}
    return {one.name: found[one.name] for one in asked if one.name in kept}


def _disjoint(vectors: Iterable[_Vector]) -> Iterator[list[_Vector]]:
    """Yields those that share a forward: no sink is two's."""
    waiting = list(vectors)
    while waiting:
        taken: set[Key] = set()
        part, later = [], []
        for one in waiting:
            if not taken.isdisjoint(one.sinks):
                later.append(one)
                continue
            part.append(one)
            taken |= one.sinks
        yield part
        waiting = later


def _reach(vector: _Vector, rows: Mapping[Key, Tensor]) -> Reach:
    return {key: Influence(vector.units.shape[1], reach) for key, reach in rows.items() if bool(reach.any())}


class _Tests:
    def __init__(self, calls: Mapping[Key, Call], met: Met) -> None:
        self._calls, self._met = calls, met

    def by_digits(self, vectors: list[_Vector]) -> Iterator[tuple[_Vector, Reach]]:
        """Yields the reach of those that `Digits` tell apart."""
        left = [one for one in vectors if len(one.units) > 1]
        digits = {one.name: Digits(len(one.units)) for one in left}
        met: dict[str, list[Mapping[Key, Tensor]]] = {one.name: [] for one in left}
        while now := [one for one in left if len(met[one.name]) < len(digits[one.name].tests)]:
            reached = self._reached(now, {one.name: digits[one.name].tests[len(met[one.name])] for one in now})
            for one in now:
                met[one.name].append(reached)
                if any(digits[one.name].is_unclear([row[key] for row in met[one.name]]) for key in one.sinks):
                    left.remove(one)
        for one in left:
            told = {key: digits[one.name].reach(torch.stack([row[key] for row in met[one.name]])) for key in one.sinks}
            clear = {key: reach for key, reach in told.items() if reach is not None}
            if len(clear) == len(told):
                yield one, _reach(one, clear)

    def each(self, vectors: list[_Vector]) -> Iterator[tuple[_Vector, Reach]]:
        """Tests each unit of those whose samples do not reach alike."""
        sampled = self._at(vectors, {one.name: sorted({0, len(one.units) // 3, len(one.units) - 1}) for one in vectors})
        left = [one for one in vectors if not any(reach.is_mixing for reach in sampled[one.name].values())]
        whole = self._at(left, {one.name: range(len(one.units)) for one in left})
        yield from ((one, whole[one.name]) for one in left)

    def _at(self, vectors: list[_Vector], places: Mapping[str, Iterable[int]]) -> dict[str, Reach]:
        waiting = {name: list(each) for name, each in places.items()}
        rows: dict[str, list[Mapping[Key, Tensor]]] = {one.name: [] for one in vectors}
        while now := [one for one in vectors if len(rows[one.name]) < len(waiting[one.name])]:
            reached = self._reached(now, {one.name: [waiting[one.name][len(rows[one.name])]] for one in now})
            for one in now:
                rows[one.name].append(reached)
        return {
            one.name: _reach(one, {key: torch.stack([row[key] for row in rows[one.name]]) for key in one.sinks})
            for one in vectors
        }

    def _reached(self, vectors: list[_Vector], which: Mapping[str, Tensor | list[int]]) -> dict[Key, Tensor]:
        """Returns the reach of these units among their sinks, in one forward."""
        sinks = frozenset().union(*(one.sinks for one in vectors))
        found = self._met({one.name: one.units[which[one.name]].flatten() for one in vectors}, sinks)
        return {key: found[key] if key in found else self._nothing(key) for key in sinks}

    def _nothing(self, key: Key) -> Tensor:
        return torch.zeros(self._calls[key].in_features, dtype=torch.bool)
