"""Finds which features of one contraction reach which of others: tests, packed into as few forwards as can be.

Each row of a batch carries a test, where rows can be told apart. What a test costs is a row of all that runs between
contractions, and a forward at least where rows cannot: so few tests are asked first (three samples of each source), and
what these leave open is told by digits, or by one test for each unit where digits do not tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm

import torch
from torch import Tensor

from .calls import Findings, Influence, Key, Reached, Test
from .digits import Digits
from .forwards import Forwards

EXHAUSTIVE = 256
"""Up to so many features each is probed alone."""
UNITS = 64
"""Beyond that, features are probed in so many equal units or a few more: whole atoms, as far as samples show."""
UNITS_ALONE = 32
"""The same for contractions whose rows are dealt out by value: their tests fill whole forwards."""
ROWS = 192
"""Tests in one forward, at most."""
NUMBERS = 1 << 22
"""Numbers in one result of a forward with tests, at most: what is larger comes from fresh memory each time."""

Reaches = dict[Key, dict[Key, Influence]]
"""Source -> sink -> what reaches it."""
_Rows = dict[Key, dict[Key, list[Tensor]]]
"""The same, a row for each test as they are made."""


class Influences:
    """Tests the calls that `findings` has; finds routers as it goes, and adds them."""

    def __init__(self, findings: Findings, forwards: Forwards) -> None:
        self._findings, self._forwards = findings, forwards
        self._vectors: Mapping[str, int] = {}  # parameters of one dim that are asked of too, and their sizes

    # ------------------------------------------------------------ what is asked

    def sampled(self, keys: Iterable[Key], *, bridge: bool = False) -> Reaches:
        """Tests by the first feature, the last, and one between."""
        tests = [Test(key, torch.tensor([at])) for key in keys for at in self._samples(key, 3)]
        return self._reaches(self._in_rows(tests, {}, bridge, is_sample=not bridge), {})

    def in_full(self, keys: Iterable[Key], sampled: Reaches, *, bridge: bool = False) -> Reaches:
        """Tests all features, in units, of sinks that samples showed not to mix them."""
        keys = list(keys)
        units = self._units(keys, sampled)
        counts = {key: -(-self._size(key) // units[key]) for key in keys}
        digits = {key: Digits(counts[key], self._neighbours(sampled[key], self._size(key), units[key])) for key in keys}
        shorter = [key for key in keys if 2 * len(digits[key].tests) <= counts[key]]
        apart = _structured(sampled)
        tests = [Test(key, self._features(key, units, which)) for key in shorter for which in digits[key].tests]
        seen = self._in_rows(tests, apart, bridge)
        told = {
            key: {sink: digits[key].reach(torch.stack(rows)) for sink, rows in sinks.items() if _any(rows)}
            for key, sinks in seen.items()
        }
        clear: _Rows = {
            key: {sink: list(reach) for sink, reach in sinks.items() if reach is not None}
            for key, sinks in told.items()
            if not any(reach is None for reach in sinks.values())
        }
        each = [
            Test(key, self._features(key, units, [at])) for key in keys if key not in clear for at in range(counts[key])
        ]
        clear |= self._in_rows(each, apart, bridge)
        return self._reaches({key: clear[key] for key in keys if key in clear}, units)

    def of_vectors(
        self, sizes: Mapping[str, int], whole: Mapping[str, tuple[str, ...]], grouped: frozenset[Key]
    ) -> dict[str, dict[Key, Influence]]:
        """Finds the reach of the entries of parameters that are no contraction's: a gate, a decay, a number per head.

        Returns that of those that reach sinks of groups alone (`grouped`), and none with all entries alike: what
        reaches anything else is cut with none. `whole` has all parameters of modules that have no others, as norms are:
        what one reaches all do. A parameter is the same in all rows of a batch: each test is asked in all of them.
        """
        self._vectors = sizes
        reached: dict[tuple[str, ...], frozenset[Key]] = {}
        asked = {}
        for name, size in sizes.items():
            together = whole.get(name, (name,))
            if size > 1 and together not in reached:
                met = self._reached_by([(one, 0) for one in together]).features
                reached[together] = frozenset(sink for sink, features in met.items() if bool(features.any()))
            if size > 1 and reached[together] and reached[together] <= grouped:
                asked[name, 0] = reached[together]
        tests = [Test(key, torch.tensor([at])) for key in asked for at in self._samples(key, 3)]
        sampled = self._reaches(self._in_rows(tests, asked, False), {})
        structured = [key for key in asked if not any(one.is_mixing for one in sampled[key].values())]
        found = self.in_full(structured, sampled)
        kept = {key: reach for key, reach in found.items() if not any(one.is_mixing for one in reach.values())}
        return {name: reach for (name, _), reach in kept.items() if reach}

    def _neighbours(self, sampled: Mapping[Key, Influence], size: int, unit: int) -> int:
        """Returns how many neighbouring units fill whole atoms of every sink, if its features are as many as the
        samples reach and atoms of source and sink are as many: 3 units of two thirds of a head each fill two heads."""
        calls, found = self._findings.calls, 1
        for sink, one in sampled.items():
            if not one.is_mixing:
                reached = max(int(row.sum()) for row in one.reach)
                found = lcm(found, Fraction(reached * size, calls[sink].in_features * unit).numerator)
        return found

    def _samples(self, key: Key, parts: int) -> list[int]:
        size = self._size(key)
        return sorted({0, size // parts, size - 1})

    def _size(self, key: Key) -> int:
        call = self._findings.calls.get(key)
        return self._vectors[key[0]] if call is None else call.out_features

    def _follows_batch(self, key: Key) -> bool:
        """True if rows of a batch have tests of their own."""
        call = self._findings.calls.get(key)
        return call is not None and call.outer is not None

    def _features(self, key: Key, units: Mapping[Key, int], which: Tensor | list[int]) -> Tensor:
        """The out features of these units."""
        unit, size = units[key], self._size(key)
        numbers = torch.arange(-(-size // unit))[which]
        features = (numbers[:, None] * unit + torch.arange(unit)).flatten()
        return features[features < size]

    def _units(self, keys: Sequence[Key], sampled: Mapping[Key, Mapping[Key, Influence]]) -> dict[Key, int]:
        """Returns how many neighbouring features are tested together: a common divisor of what samples reached at each
        sink."""
        sinks: dict[Key, int] = {}
        for reached in sampled.values():
            for sink, one in reached.items():
                if not one.is_mixing:
                    for row in one.reach:
                        sinks[sink] = gcd(sinks.get(sink, 0), int(row.sum()))
        units = {}
        for key in keys:
            size, atom = self._size(key), 0
            structured = [sink for sink, one in sampled[key].items() if not one.is_mixing]
            for sink in structured:
                atom = gcd(atom, sinks[sink])
            packed = self._follows_batch(key)
            if key[0] in self._vectors:
                units[key] = 1 if size <= UNITS else size // gcd(size, UNITS_ALONE)
                continue
            if size <= (EXHAUSTIVE if packed else UNITS_ALONE):
                units[key] = 1
                continue
            atom = gcd(atom, size) or 1
            common = size
            for sink in structured:  # a unit may straddle no boundary between the segments of a packed weight
                common = gcd(common, self._findings.calls[sink].in_features)
            count = common // gcd(atom, common)
            least = min(count, UNITS if packed else UNITS_ALONE)
            merged = max((m for m in range(1, count + 1) if count % m == 0 and count // m >= least), default=1)
            units[key] = gcd(atom, common) * merged
        return units

    @staticmethod
    def _reaches(rows: _Rows, units: Mapping[Key, int]) -> Reaches:
        return {
            source: {
                sink: Influence(units.get(source, 1), torch.stack(list(reach)))
                for sink, reach in sinks.items()
                if _any(reach)
            }
            for source, sinks in rows.items()
        }

    # ----------------------------------------------------------------- forwards

    def taints(
        self,
        batch: int,
        tests: Mapping[int, Sequence[Test]],
        everywhere: Sequence[Test] = (),
        *,
        shift: bool = False,
        bridge: bool = False,
        among: Mapping[Key, frozenset[Key]] | None = None,
    ) -> Reached:
        """Runs one forward, and returns where these tests arrive; it ends when the sinks `among` which they are looked
        for are met."""
        sinks = [(among or {}).get(test.key) for part in (*tests.values(), everywhere) for test in part]
        until = None if None in sinks or not sinks or bridge else frozenset().union(*sinks)
        calls = self._findings.calls
        settings = {"tests": tests, "everywhere": everywhere, "shift": shift, "bridge": bridge, "until": until}
        return self._forwards.run(batch, calls=calls, **settings).reached

    def _in_rows(
        self, tests: Iterable[Test], apart: Mapping[Key, frozenset[Key]], bridge: bool, *, is_sample: bool = False
    ) -> _Rows:
        """Returns each test's reach, in order by source and sink; of sinks that are told `apart`, among these only."""
        calls = self._findings.calls
        packed: list[Test] = []
        alone: list[Test] = []
        hidden = {key for key, call in calls.items() if call.outer is None and call.in_features}
        for test in tests:
            apart_from_batch = not (self._follows_batch(test.key) and hidden.isdisjoint(apart.get(test.key, ())))
            (alone if apart_from_batch else packed).append(test)
        rows: _Rows = {}
        lines = list(_apart(packed, apart)) if apart else [[test] for test in packed]
        for part in self._forwards_of(lines):
            seen = self.taints(len(part) + 1, part, bridge=bridge, among=apart)
            for row, together in part.items():
                for test in together:
                    self._add(rows, test, row, seen, apart.get(test.key))
        if is_sample:
            self._shifted(rows, packed)
        if hidden and is_sample:  # packed tests cannot be told apart where rows follow no batch
            self._at_hidden(rows, hidden)
        for part in _apart(alone, apart):
            seen = self.taints(1, {}, part, bridge=bridge, among=apart)
            for test in part:
                self._add(rows, test, 0, seen, apart.get(test.key))
        return rows

    def _forwards_of(self, lines: Sequence[Sequence[Test]]) -> Iterator[dict[int, Sequence[Test]]]:
        """Row -> tests of each forward."""
        calls = self._findings.calls
        wide = max((calls[key].out_features for key in calls if key not in self._forwards.silent), default=1)
        most = min(ROWS, max(8, NUMBERS // (wide * (self._forwards.sample.positions or 1))))
        for start in range(0, len(lines), most):
            yield dict(enumerate(lines[start : start + most], 1))

    def _shifted(self, rows: _Rows, tests: Sequence[Test]) -> None:
        """Adds the paths that NaN may skip: where all samples of a call, shifted together, reach more than NaN did in
        any of them, what each one reaches."""
        samples: dict[Key, list[Test]] = {}
        for test in tests:
            samples.setdefault(test.key, []).append(test)
        together = [[Test(key, torch.cat([one.features for one in each]))] for key, each in samples.items()]
        more: list[Key] = []
        for part in self._forwards_of(together):
            seen = self.taints(len(part) + 1, part, shift=True)
            more += [test.key for row, (test,) in part.items() if self._is_more(rows[test.key], test.key, seen, row)]
        for part in self._forwards_of([[test] for key in more for test in samples[key]]):
            seen = self.taints(len(part) + 1, part, shift=True)
            for row, (test,) in part.items():
                sinks, at = rows[test.key], samples[test.key].index(test)
                for sink, hit in self._hits(test.key, seen, row):
                    if bool(hit.any()):
                        reach = sinks.setdefault(sink, [torch.zeros_like(hit)] * len(samples[test.key]))
                        reach[at] = reach[at] | hit

    def _is_more(self, known: Mapping[Key, Sequence[Tensor]], source: Key, seen: Reached, row: int) -> bool:
        """True if a sink was met where none of the tests before met it."""
        hits = [(hit, known.get(sink, ())) for sink, hit in self._hits(source, seen, row)]
        return any(bool((hit & ~torch.stack(before).any(0)).any() if before else hit.any()) for hit, before in hits)

    def _hits(self, source: Key, seen: Reached, row: int) -> Iterator[tuple[Key, Tensor]]:
        """Yields what a test met of each sink of its source."""
        for sink, call in self._findings.calls.items():
            if (sink != source or call.stack) and call.in_features:
                none = torch.zeros(call.in_features, dtype=torch.bool)
                yield sink, seen.features[sink][row] if sink in seen.features else none

    def _add(self, rows: _Rows, test: Test, row: int, seen: Reached, among: Iterable[Key] | None = None) -> None:
        sinks = rows.setdefault(test.key, {})
        count = max((len(reach) for reach in sinks.values()), default=0)
        for sink, hit in self._hits(test.key, seen, row):
            if among is not None and sink not in among:
                continue
            if sink in sinks:
                sinks[sink].append(hit)
            elif bool(hit.any()) or not sinks:
                sinks[sink] = [torch.zeros_like(hit)] * count + [hit]
        if not sinks:
            call = self._findings.calls.get(test.key)
            sinks[test.key] = [torch.zeros(max(1, call.in_features if call else 0), dtype=torch.bool)]
        if bool(seen.selectors[row]):
            self._findings.routers.add(test.key)

    # ------------------------------------------------- sinks that follow no batch

    def _at_hidden(self, rows: _Rows, hidden: set[Key]) -> None:
        """Adds what samples of the sources in `rows` reach of `hidden` sinks, each in forwards of its own.

        What mixes elsewhere is no source to split. It is asked for one feature: if that reaches all features of all
        sinks that any source reaches and that come after it, then so does the rest of it.
        """
        findings, calls = self._findings, self._findings.calls
        mixing = {key for key, reached in rows.items() if _mixes(reached)}
        asked = [key for key in rows if not (key in mixing and findings.is_later(key))]
        whole = self._reached_by([key for key in asked if key not in findings.routers])
        met = [calls[sink] for sink, features in whole.features.items() if sink in hidden and bool(features.any())]
        left = []
        for key in asked:
            after = [call.key for call in met if call.repeated or call.order > calls[key].order]
            if after and key in mixing:
                test = Test(key, torch.tensor([0]))
                seen = self.taints(1, {}, (test,))
                if all(sink in seen.features and bool(seen.features[sink].all()) for sink in after):
                    self._add(rows, test, 0, seen, hidden)
                    continue
            left.append(key)
        for key in self._reaching(left, hidden):
            for at in self._samples(key, 2):
                test = Test(key, torch.tensor([at]))
                self._add(rows, test, 0, self.taints(1, {}, (test,)), hidden)

    def _reached_by(self, keys: Sequence[Key]) -> Reached:
        """Returns where all features of these calls arrive."""
        return self.taints(1, {}, [Test(key, torch.arange(self._size(key))) for key in keys])

    def _reaching(self, keys: Sequence[Key], hidden: set[Key]) -> Iterator[Key]:
        """Yields those of these that reach a hidden sink, or what selects: by halves, for no stub hands a taint on, so
        that several together reach what one of them does."""
        routers = self._findings.routers
        yield from [key for key in keys if key in routers]
        waiting = [[key for key in keys if key not in routers]]
        while waiting:
            part = waiting.pop()
            if not part:
                continue
            reached = self._reached_by(part)
            if not bool(reached.selectors.any()) and not any(
                bool(reached.features[sink].any()) for sink in hidden & reached.features.keys()
            ):
                continue
            if len(part) == 1:
                yield part[0]
            else:
                waiting += [part[len(part) // 2 :], part[: len(part) // 2]]


def _apart(tests: Sequence[Test], sinks: Mapping[Key, frozenset[Key]]) -> Iterator[list[Test]]:
    """Tests that share one forward: of sources whose sinks, as far as samples showed, are not the same."""
    waiting = list(tests)
    while waiting:
        taken: set[Key] = set()
        part, later = [], []
        for test in waiting:
            reached = sinks.get(test.key)
            if part and (reached is None or not taken.isdisjoint(reached | {test.key})) or (part and None in taken):
                later.append(test)
                continue
            part.append(test)
            taken |= {None} if reached is None else reached | {test.key}
        yield part
        waiting = later


def _structured(reaches: Reaches) -> dict[Key, frozenset[Key]]:
    """Returns, for each source, the sinks that do not mix its features."""
    return {key: frozenset(s for s, i in sinks.items() if not i.is_mixing) for key, sinks in reaches.items()}


def _mixes(reached: Mapping[Key, Sequence[Tensor]]) -> bool:
    """True if some sink shows already that this is no source to split, whatever else it reaches."""
    return any(_any(reach) and Influence(1, torch.stack(list(reach))).is_mixing for reach in reached.values())


def _any(rows: Sequence[Tensor]) -> bool:
    return any(bool(row.any()) for row in rows)
