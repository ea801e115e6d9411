"""Influence probing of a whole model: its contractions, and which features of one reach which of the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor.engine import flex_formulas

from ..progress import Bar
from .blocks import Chain, chains, hand_on
from .calls import Findings, Influence, Key, Reached, Site, Test
from .model import OnOneDevice, buffers_kept, first_tensor, on_meta, paths, plain_kernels
from .operands import Operands
from .pairs import paired
from .run import Enough, Probe
from .sample import Sample
from .vectors import vectors_reach

FOLLOWED = 3
"""Rows of the first forward; row 1 is followed."""
EXHAUSTIVE = 256
"""Up to so many features each is probed alone."""
UNITS = 64
"""Beyond that, features are probed in so many equal units or a few more: whole atoms, as far as samples show."""
UNITS_ALONE = 32
"""The same for contractions whose rows are dealt out by value: their tests fill whole forwards."""
ROWS = 192
"""Tests in one forward, at most."""
NUMBERS = 1 << 22
"""In one result of a forward with tests, or a few more: what is larger comes from fresh memory each time."""
SEEDS = (1, 2)
"""Further forwards with other stub values, for paths that depend on the data."""
_NOTHING: Mapping = {}


def probe(model: nn.Module, sample: Sample, bar: Bar) -> Findings:
    """Runs `model` on repeated rows of `sample` with stubs for its contractions; see `probe_run`.

    Nothing of the model is changed: a copy with parameters on the meta device is run. Needs no process group.
    """
    return _Prober(model, sample, bar).run(model)


class _Prober:
    def __init__(self, model: nn.Module, sample: Sample, bar: Bar) -> None:
        self.bar = bar
        self.names = [(name, one) for name, one in model.named_parameters(remove_duplicate=False)]
        self.sample = sample
        self.chains = chains(model)
        self.silent: frozenset[Key] = frozenset()
        self._sinks: dict[Key, frozenset[Key]] = {}
        self._values: dict[tuple[int, ...], Tensor] = {}
        self.findings = Findings({}, {}, like=_like(model, self.chains))
        self._copy(model, self.chains)

    def run(self, model: nn.Module) -> Findings:
        found = self.findings
        first = self._first(model)
        found.calls, found.shapes, found.chosen = first.calls, self.operands.shapes, first.chosen
        found.chains, found.tied = self.chains, _tied(self.names)
        found.coupled = tuple(dict.fromkeys(call.key[0] for call in first.calls.values() if call.coupled))
        for seed in SEEDS[:1] if not self._routed() else SEEDS:
            other = self._forward(2, seed=seed, calls=found.calls)
            for key, call in other.calls.items():
                found.calls.setdefault(key, call)
            self._by_sizes(first, other)
        sampled = self._influences(self._sampled(found.calls), {})
        wanted = [
            key
            for key in found.calls
            if not self._is_later(key) and any(not i.is_mixing for i in sampled.get(key, {}).values())
        ]
        self._sinks = {key: frozenset(s for s, i in sinks.items() if not i.is_mixing) for key, sinks in sampled.items()}
        self.silent = frozenset(key for key in found.calls if not sampled.get(key) and key not in found.routers)
        units = self._units(wanted, sampled)
        found.influences = self._influences(self._in_full(wanted, units), units, sampled=sampled)
        for key, sinks in sampled.items():
            whole = found.influences.setdefault(key, {})
            for sink, one in sinks.items():
                whole.setdefault(sink, one)
        self._sinks = {}
        self._bridge()
        self._vectors()
        self._positions()
        return found

    # ---------------------------------------------------------------- forwards

    def _copy(self, model: nn.Module, skipped: Sequence[Chain]) -> None:
        """What runs from now on: `model` without weights, in which blocks of these chains stand in for their like."""
        stand_ins = {name: like for chain in skipped for name, like in chain.skipped.items()}
        self.model = on_meta(model, stand_ins).eval()
        self.operands = Operands(self.model.named_parameters(), _biases(self.model))
        self.recurrent = any(isinstance(one, nn.RNNBase) for one in self.model.modules())
        self.watched = [(name, one) for name, one in self.model.named_modules() if name not in stand_ins]
        hand_on(self.model, skipped)

    def _first(self, model: nn.Module) -> Probe:
        try:
            return self._followed()
        except Exception:
            if not self.chains:
                raise
        self._copy(model, ())  # a block that another one reads from, or that returns something else each time
        return self._followed()

    def _followed(self) -> Probe:
        """The first forward. A sample of equal integers is made to differ in one tensor after the other, until some
        contraction shows which rows are row 1's."""
        first = self._forward(FOLLOWED, follow=True)
        for moved in range(self.sample.alike):
            if any(call.outer is not None or call.coupled for call in first.calls.values()):
                break
            first = self._forward(FOLLOWED, follow=True, moved=moved)
        return first

    def _forward(self, batch: int, *, follow: bool = False, moved: int | None = None, **settings: Any) -> Probe:
        args, kwargs = self.sample.repeat(batch, follow=follow, moved=moved)
        probe = Probe(self.operands, batch, silent=self.silent, values=self._values, **settings)
        with ExitStack() as stack:
            stack.enter_context(paths(self.watched, probe.path, self._note if follow else None))
            stack.enter_context(plain_kernels())
            stack.enter_context(buffers_kept(self.model))
            stack.enter_context(torch.no_grad())
            stack.enter_context(flex_formulas())
            stack.enter_context(probe)
            stack.enter_context(OnOneDevice(self.operands, self.recurrent))
            with suppress(Enough):
                self.model(*args, **kwargs)
        self.bar.tick("probing the model")
        return probe

    def _note(self, name: str, args: Any, output: Any) -> None:
        for sites, value in ((self.findings.inputs, args), (self.findings.outputs, output)):
            tensor = first_tensor(value)
            if tensor is None or tensor.ndim < 2 or not tensor.is_floating_point():
                continue
            sizes = list(tensor.shape[:-1])
            batch = sizes.index(FOLLOWED) if FOLLOWED in sizes else None
            positions = self.sample.positions
            position = next((d for d, s in enumerate(sizes) if s == positions and d != batch), None)
            sites.setdefault(name, Site(name, batch, position, tensor.shape[-1]))

    def _by_sizes(self, first: Probe, other: Probe) -> None:
        """Where rows lie of which nothing was followed (steps of a diffusion, made from integers): the one dim that was
        as large as the batch in two forwards."""
        for key, call in self.findings.calls.items():
            if call.untouched and call.outer is None and key in first.leading and key in other.leading:
                one, two = first.leading[key], other.leading[key]
                dims = [d for d, sizes in enumerate(zip(one, two)) if sizes == (first.batch, other.batch)]
                if len(one) == len(two) and len(dims) == 1:
                    call.outer = prod(one[: dims[0]])

    # ------------------------------------------------------------------- tests

    def _routed(self) -> bool:
        return any(call.stack or call.scattered or call.outer is None for call in self.findings.calls.values())

    def _sampled(self, keys: Iterable[Key]) -> Iterator[Test]:
        for key in keys:
            size = self.findings.calls[key].out_features
            for at in sorted({0, size // 3, size - 1}):
                yield Test(key, torch.tensor([at]))

    def _in_full(self, keys: Iterable[Key], units: Mapping[Key, int]) -> Iterator[Test]:
        for key in keys:
            size, unit = self.findings.calls[key].out_features, units.get(key, 1)
            for at in range(0, size, unit):
                yield Test(key, torch.arange(at, min(size, at + unit)))

    def _units(self, keys: Sequence[Key], sampled: Mapping[Key, Mapping[Key, Influence]]) -> dict[Key, int]:
        """How many neighbouring features are tested together: a common divisor of what samples reached at each sink."""
        sinks: dict[Key, int] = {}
        for reached in sampled.values():
            for sink, one in reached.items():
                if not one.is_mixing:
                    for row in one.reach:
                        sinks[sink] = gcd(sinks.get(sink, 0), int(row.sum()))
        units = {}
        for key in keys:
            size, atom = self.findings.calls[key].out_features, 0
            structured = [sink for sink, one in sampled[key].items() if not one.is_mixing]
            for sink in structured:
                atom = gcd(atom, sinks[sink])
            packed = self.findings.calls[key].outer is not None
            if size <= (EXHAUSTIVE if packed else UNITS_ALONE):
                units[key] = 1
                continue
            atom = gcd(atom, size) or 1
            common = size
            for sink in structured:  # a unit may straddle no boundary between the segments of a packed weight
                common = gcd(common, self.findings.calls[sink].in_features)
            count = common // gcd(atom, common)
            least = min(count, UNITS if packed else UNITS_ALONE)
            merged = max((m for m in range(1, count + 1) if count % m == 0 and count // m >= least), default=1)
            units[key] = gcd(atom, common) * merged
        return units

    def _influences(
        self, tests: Iterable[Test], units: Mapping[Key, int], *, sampled: Mapping = _NOTHING, bridge: bool = False
    ) -> dict[Key, dict[Key, Influence]]:
        """Runs the tests, packed into as few forwards as can be, and sorts what they reached by source and sink."""
        apart = {key: frozenset(s for s, i in sinks.items() if not i.is_mixing) for key, sinks in sampled.items()}
        calls = self.findings.calls
        packed: list[Test] = []
        alone: list[Test] = []
        hidden = {key for key, call in calls.items() if call.outer is None and call.in_features}
        for test in tests:
            apart_from_batch = calls[test.key].outer is None or not hidden.isdisjoint(apart.get(test.key, ()))
            (alone if apart_from_batch else packed).append(test)
        rows: dict[Key, dict[Key, list[Tensor]]] = {}
        lines = list(_apart(packed, apart)) if apart else [[test] for test in packed]
        wide = max((calls[key].out_features for key in calls if key not in self.silent), default=1)
        most = min(ROWS, max(8, NUMBERS // (wide * (self.sample.positions or 1))))
        for start in range(0, len(lines), most):
            part = dict(enumerate(lines[start : start + most], 1))
            seen = [self._taints(len(part) + 1, part, (), False, bridge)]
            if not bridge and not units:  # samples show the paths that NaN may skip
                seen.append(self._taints(len(part) + 1, part, (), True, False))
            for row, together in part.items():
                for test in together:
                    self._add(rows, test, row, seen, apart.get(test.key))
        if hidden and not units and not bridge:  # packed tests cannot be told apart where rows follow no batch
            asked = [
                key
                for key in dict.fromkeys(test.key for test in packed)
                if not (self._is_later(key) and _mixes(rows[key]))
            ]
            for key in self._reaching(asked, hidden):
                size = calls[key].out_features
                for at in sorted({0, size // 2, size - 1}):
                    test = Test(key, torch.tensor([at]))
                    self._add(rows, test, 0, [self._taints(1, {}, (test,), False, bridge)], hidden)
        for part in _apart(alone, apart):
            seen = self._taints(1, {}, part, False, bridge)
            for test in part:
                self._add(rows, test, 0, [seen], apart.get(test.key))
        return {
            source: {
                sink: Influence(units.get(source, 1), torch.stack(list(reach)))
                for sink, reach in sinks.items()
                if any(bool(one.any()) for one in reach)
            }
            for source, sinks in rows.items()
        }

    def _reaching(self, keys: Sequence[Key], hidden: set[Key]) -> Iterator[Key]:
        """Of these those that reach a hidden sink, or what selects: by halves, for no stub hands a taint on, so that
        several together reach what one of them does."""
        routers = self.findings.routers
        waiting = [[key for key in keys if key not in routers], *([key] for key in keys if key in routers)]
        while waiting:
            part = waiting.pop()
            if not part:
                continue
            every = [Test(key, torch.arange(self.findings.calls[key].out_features)) for key in part]
            reached = self._taints(1, {}, every, False, False)
            if not bool(reached.selectors.any()) and not any(
                bool(reached.features[sink].any()) for sink in hidden & reached.features.keys()
            ):
                continue
            if len(part) == 1:
                yield part[0]
            else:
                waiting += [part[len(part) // 2 :], part[: len(part) // 2]]

    def _is_later(self, key: Key) -> bool:
        """Whether it is of a block that has a like before it."""
        return self.findings.like.get(key[0], key)[0] != key[0]

    def _taints(self, batch: int, tests, everywhere, shift: bool, bridge: bool) -> Reached:
        sinks = [self._sinks.get(test.key) for part in (*tests.values(), everywhere) for test in part]
        until = None if None in sinks or not sinks or bridge else frozenset().union(*sinks)
        probe = self._forward(
            batch,
            calls=self.findings.calls,
            tests=tests,
            everywhere=everywhere,
            shift=shift,
            bridge=bridge,
            until=until,
        )
        return probe.reached

    def _add(
        self, rows: dict, test: Test, row: int, seen: Sequence[Reached], among: Iterable[Key] | None = None
    ) -> None:
        sinks = rows.setdefault(test.key, {})
        count = max((len(reach) for reach in sinks.values()), default=0)
        for sink, call in self.findings.calls.items():
            if sink == test.key and not call.stack or not call.in_features or (among is not None and sink not in among):
                continue
            hits = [one.features[sink][row] for one in seen if sink in one.features]
            hit = torch.stack(hits).any(0) if hits else torch.zeros(call.in_features, dtype=torch.bool)
            if sink in sinks:
                sinks[sink].append(hit)
            elif bool(hit.any()) or not sinks:
                sinks[sink] = [torch.zeros_like(hit)] * count + [hit]
        if not sinks:
            sinks[test.key] = [torch.zeros(max(1, self.findings.calls[test.key].in_features), dtype=torch.bool)]
        if bool(seen[0].selectors[row]):
            self.findings.routers.add(test.key)

    # ----------------------------------------------------------- further passes

    def _bridge(self) -> None:
        """A norm over all features between a source and a sink that others reach feature by feature, or nobody else."""
        found = self.findings
        structured = {sink for sinks in found.influences.values() for sink, one in sinks.items() if not one.is_mixing}
        found.enclosed = self._enclosed()
        structured |= found.enclosed
        sources = [
            key
            for key, sinks in found.influences.items()
            if sinks
            and not found.calls[key].lookup
            and all(one.is_mixing for one in sinks.values())
            and set(sinks) <= structured
        ]
        sampled = self._influences(self._sampled(sources), {}, bridge=True)
        sources = [key for key in sources if any(not one.is_mixing for one in sampled.get(key, {}).values())]
        units = self._units(sources, sampled)
        found.bridged = self._influences(self._in_full(sources, units), units, sampled=sampled, bridge=True)

    def _enclosed(self) -> set[Key]:
        """Sinks whose sources reach nothing else, and that are neither a source to split nor the last: what reads a
        residual stream is none, for all blocks do."""
        influences, calls = self.findings.influences, self.findings.calls
        shared = {
            sink
            for key, sinks in influences.items()
            for sink in sinks
            if len(sinks) > 1 or calls[key].lookup or calls[key].outer is None
        }
        return {
            sink
            for sinks in influences.values()
            for sink in sinks
            if sink not in shared and calls[sink].outer is not None and self._only_mixes(sink)
        }

    def _only_mixes(self, key: Key) -> bool:
        """Whether it reaches something, and nothing feature by feature."""
        reached = self.findings.influences.get(key, {})
        return bool(reached) and all(one.is_mixing for one in reached.values())

    def _vectors(self) -> None:
        found = self.findings
        biases = {call.bias for call in found.calls.values()}
        sizes = {n: s for n, s in self.operands.vectors.items() if found.like.get(n, (n,))[0] == n and n not in biases}
        whole: dict[str, tuple[str, ...]] = {}
        for module, one in self.model.named_modules():
            own = tuple(f"{module}.{name}".removeprefix(".") for name in one._parameters)
            if set(own) <= sizes.keys() and not any(True for _ in one.children()):
                whole |= dict.fromkeys(own, own)
        found.vectors = vectors_reach(sizes, whole, found.calls, frozenset(paired(found)), self._met)

    def _met(self, entries: Mapping[str, Tensor], among: frozenset[Key] | None) -> dict[Key, Tensor]:
        """What these entries of parameters reach, of all calls or `among` some: bool [in features] per sink."""
        self.operands.tainted = entries
        try:
            reached = self._forward(1, calls=self.findings.calls, until=among).reached
        finally:
            self.operands.tainted = {}
        return {
            key: row[0] for key, row in reached.features.items() if (among is None or key in among) and bool(row.any())
        }

    def _positions(self) -> None:
        """Whether what the residual stream carries at one position stays there."""
        positions = self.sample.positions
        if positions is None or positions < 3:
            return
        calls = self.findings.calls
        sources = [key for key, call in calls.items() if call.outer is not None and not call.untouched]
        for start in range(0, len(sources), ROWS):
            part = sources[start : start + ROWS]
            tests = {row + 1: (Test(key, None, token=1),) for row, key in enumerate(part)}
            reached = self._taints(len(part) + 1, tests, (), False, False)
            for row, key in enumerate(part):
                seen = [tokens[row + 1] for tokens in reached.tokens.values() if bool(tokens[row + 1].any())]
                wanted = torch.arange(positions) == 1
                self.findings.token_wise[key] = bool(seen) and all(
                    one.shape == wanted.shape and torch.equal(one, wanted) for one in seen
                )


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


def _mixes(reached: Mapping[Key, Sequence[Tensor]]) -> bool:
    """Whether some sink shows already that this is no source to split, whatever else it reaches."""
    found = (Influence(1, torch.stack(list(reach))) for reach in reached.values())
    return any(bool(one.reach.any()) and one.is_mixing for one in found)


def _like(model: nn.Module, found: Sequence[Chain]) -> dict[str, tuple[str, ...]]:
    like: dict[str, tuple[str, ...]] = {}
    for chain in found:
        for kind in set(chain.kinds):
            blocks = [name for name, one in zip(chain.names, chain.kinds) if one == kind]
            for members in ("named_parameters", "named_modules"):
                each = [[name for name, _ in getattr(model.get_submodule(block), members)()] for block in blocks]
                for names in zip(*each):
                    full = tuple(f"{block}.{name}".removesuffix(".") for block, name in zip(blocks, names))
                    like.update(dict.fromkeys(full, full))
    return like


def _biases(model: nn.Module) -> dict[str, str]:
    """Weight -> bias of modules that add it to their product, be it in one operator or in two: a linear layer's are two
    where its input does not lie in order."""
    linear = ((name, one) for name, one in model.named_modules() if type(one).forward is nn.Linear.forward)
    return {f"{name}.weight": f"{name}.bias" for name, one in linear if one.bias is not None}


def _tied(named: Sequence[tuple[str, Tensor]]) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, parameter in named:
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
