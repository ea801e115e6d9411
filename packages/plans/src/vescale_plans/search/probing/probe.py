"""Influence probing of a whole model: its contractions, and which features of one reach which of the next."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..progress import Bar
from ..structure import Blocks
from .blocks import chains
from .calls import Findings, Key, Test, paired
from .forwards import Forwards
from .influences import ROWS, Influences
from .model import first_tensor
from .run import Probe
from .sample import Sample

FOLLOWED = 3
"""Rows of the first forward; row 1 is followed."""
SEEDS = (1, 2)
"""Further forwards with other stub values, for paths that depend on the data."""


def probe(model: nn.Module, sample: Sample, bar: Bar) -> Findings:
    """Runs `model` on repeated rows of `sample` with stubs for its contractions; see `probe_run`.

    Nothing of the model is changed: a copy with parameters on the meta device is run. Needs no process group.
    """
    return _Prober(model, sample, bar).run(model)


class _Prober:
    def __init__(self, model: nn.Module, sample: Sample, bar: Bar) -> None:
        self.bar, self.sample = bar, sample
        self.names = [(name, one) for name, one in model.named_parameters(remove_duplicate=False)]
        self.chains = chains(model)
        self.findings = Findings({}, {}, like=_like(model, self.chains))

    def run(self, model: nn.Module) -> Findings:
        found = self.findings
        first = self._first(model)
        self.tests = Influences(found, self.forwards)
        found.calls, found.shapes, found.chosen = first.calls, self.forwards.operands.shapes, first.chosen
        found.chains, found.tied = self.chains, _tied(self.names)
        found.coupled = tuple(dict.fromkeys(call.key[0] for call in first.calls.values() if call.coupled))
        ends = {first.end}
        routed = any(call.stack or call.scattered or call.outer is None for call in found.calls.values())
        for seed in SEEDS if routed else SEEDS[:1]:
            other = self.forwards.run(2, seed=seed, calls=found.calls)
            for key, call in other.calls.items():
                found.calls.setdefault(key, call)
            self._by_sizes(first, other)
            ends.add(other.end)
        self.forwards.silent = frozenset(ends if len(ends) == 1 else ()) - {None}
        sampled = self.tests.sampled(key for key in found.calls if key not in self.forwards.silent)
        wanted = [
            key
            for key in found.calls
            if not found.is_later(key) and any(not i.is_mixing for i in sampled.get(key, {}).values())
        ]
        self.forwards.silent = frozenset(
            key for key in found.calls if not sampled.get(key) and key not in found.routers
        )
        found.influences = self.tests.in_full(wanted, sampled)
        for key, sinks in sampled.items():
            found.influences[key] = sinks | found.influences.get(key, {})
        self._bridge()
        self._vectors()
        self._positions()
        return found

    def _first(self, model: nn.Module) -> Probe:
        for skipped in (self.chains, ()):
            self.forwards = Forwards(model, self.sample, skipped, self._note, self.bar)
            try:
                return self.forwards.followed(FOLLOWED)
            except Exception:  # a block that another one reads from, or that returns something else each time
                if not skipped:
                    raise
        raise AssertionError("the last forward returned or raised")

    def _note(self, name: str, args: Any, output: Any) -> None:
        for sites, value in ((self.findings.inputs, args), (self.findings.outputs, output)):
            tensor = first_tensor(value)
            if tensor is None or tensor.ndim < 2 or not tensor.is_floating_point():
                continue
            sizes = list(tensor.shape[:-1])
            batch = sizes.index(FOLLOWED) if FOLLOWED in sizes else None
            positions = self.sample.positions
            position = next((d for d, s in enumerate(sizes) if s == positions and d != batch), None)
            sites.setdefault(name, position)

    def _by_sizes(self, first: Probe, other: Probe) -> None:
        """Finds rows of which nothing was followed (steps of a diffusion, made from integers): the one dim that was as
        large as the batch in two forwards."""
        for key, call in self.findings.calls.items():
            if call.untouched and call.outer is None and key in first.leading and key in other.leading:
                one, two = first.leading[key], other.leading[key]
                dims = [d for d, sizes in enumerate(zip(one, two)) if sizes == (first.batch, other.batch)]
                if len(one) == len(two) and len(dims) == 1:
                    call.outer = prod(one[: dims[0]])

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
        sampled = self.tests.sampled(sources, bridge=True)
        sources = [key for key in sources if any(not one.is_mixing for one in sampled.get(key, {}).values())]
        found.bridged = self.tests.in_full(sources, sampled, bridge=True)

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
        """True if it reaches something, and nothing feature by feature."""
        reached = self.findings.influences.get(key, {})
        return bool(reached) and all(one.is_mixing for one in reached.values())

    def _vectors(self) -> None:
        found = self.findings
        biases = {call.bias for call in found.calls.values()}
        met = self.forwards.operands.vectors.items()
        sizes = {n: s for n, s in met if found.like.get(n, (n,))[0] == n and n not in biases}
        whole: dict[str, tuple[str, ...]] = {}
        for module, one in self.forwards.model.named_modules():
            own = tuple(f"{module}.{name}".removeprefix(".") for name in one._parameters)
            if set(own) <= sizes.keys() and not any(True for _ in one.children()):
                whole |= dict.fromkeys(own, own)
        found.vectors = self.tests.of_vectors(sizes, whole, frozenset(paired(found)))

    def _positions(self) -> None:
        """Finds whether what the residual stream carries at one position stays there."""
        positions = self.sample.positions
        if positions is None or positions < 3:
            return
        calls = self.findings.calls
        sources = [key for key, call in calls.items() if call.outer is not None and not call.untouched]
        for start in range(0, len(sources), ROWS):
            part = sources[start : start + ROWS]
            tests = {row + 1: (Test(key, None, token=1),) for row, key in enumerate(part)}
            reached = self.tests.taints(len(part) + 1, tests)
            for row, key in enumerate(part):
                seen = [tokens[row + 1] for tokens in reached.tokens.values() if bool(tokens[row + 1].any())]
                wanted = torch.arange(positions) == 1
                self.findings.token_wise[key] = bool(seen) and all(
                    one.shape == wanted.shape and torch.equal(one, wanted) for one in seen
                )


def _like(model: nn.Module, found: Sequence[Blocks]) -> dict[str, tuple[str, ...]]:
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


def _tied(named: Sequence[tuple[str, Tensor]]) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, parameter in named:
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
