"""The prices of one request's candidates: in closed form, as a bound, and exactly, with the best cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

import torch

from .._plan.parts import PlanError
from .candidates import Candidate, candidates, ways
from .pricing.cost import BUSY, Cost, Pass, again_of, cost_of, pass_of, positions_of
from .pricing.hardware import Hardware
from .pricing.interleaved import Interleaved
from .pricing.memory import Held, Memory, memory_of
from .pricing.sizes import Sizes, parts_of, sizes_of
from .stages import Cutter, Part, Stages, bound_of
from .structure import Structure

T = TypeVar("T")
ROUNDING = 1e-9
"""Slack of a bound, so that sums in another order do not lie above what they bound."""


@dataclass(frozen=True)
class Estimate:
    """A candidate with what it costs.

    Arguments:
        cost: seconds of one step.
        memory: bytes of the fullest rank.
        cuts: modules that begin the pipeline's stages 1, 2, ...
        again: blocks that are computed again in backward.
    """

    candidate: Candidate
    cost: Cost
    memory: Memory
    cuts: tuple[str, ...] = ()
    again: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """A request for a plan, see `generate_plan`; `limit` is in bytes of one rank, `dtype` what it computes in."""

    structure: Structure
    world_size: int
    batch: int
    seq: int
    hardware: Hardware
    limit: float
    objective: str = "time"
    pin: Mapping[str, Any] | None = None
    forbid: Sequence[str | Mapping[str, Any]] = ()
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.objective not in ("time", "memory"):
            remedies = [('objective="time"', 'or "memory"')]
            raise PlanError("generate_plan", f"objective is {self.objective!r}", (), remedies)

    def candidates(self, world_size: int | None = None, batch: int | None = None) -> list[Candidate]:
        """All that the request allows."""
        world, rows = world_size or self.world_size, batch or self.batch
        return list(candidates(self.structure, world, rows, seq=self.seq, pin=self.pin, forbid=self.forbid))

    def any(self, world_size: int) -> bool:
        """True if there is a candidate for that many ranks."""
        found = candidates(self.structure, world_size, self.batch, seq=self.seq, pin=self.pin, forbid=self.forbid)
        return next(found, None) is not None

    def offloading(self) -> Request | None:
        """The same with states on the host; None if that is said already, forbidden, or the host is the device."""
        said = "offload" in (self.pin or {}) or "offload" in self.forbid
        if said or self.hardware.host_link is None:
            return None
        return replace(self, pin={**(self.pin or {}), "offload": True})

    def free(self) -> Request:
        """Without pins, and with nothing forbidden."""
        return replace(self, pin=None, forbid=())


class Pricer:
    """Prices the candidates of one request; what a structure is at one degree is counted once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._known: dict[tuple, Any] = {}
        tables = {one.parameter for one in request.structure.lookups}
        self._shared = any(one.parameter in tables for one in request.structure.heads) or bool(request.structure.tied)
        points = set(request.structure.cut_points)
        self._names = request.structure.block_names or ("",)  # of the block in each part
        self._cuttable = [at == 0 or name in points for at, name in enumerate(self._names)]

    def _once(self, key: tuple, make: Callable[[], T]) -> T:
        """What `make` gave when it was first asked for by this key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def evenly(self, candidate: Candidate, batch: int | None = None) -> Estimate:
        """Estimates in closed form, with blocks dealt out evenly; all of them computed again if the candidate may."""
        held = memory_of(self._sizes_at(candidate.tp), *self._shape(candidate, batch))
        return Estimate(candidate, self._rough(candidate, batch), held)

    def _rough(self, candidate: Candidate, batch: int | None = None) -> Cost:
        """Prices with blocks dealt out evenly."""
        passes = self._pass(candidate, batch)[0], self._anew(candidate, batch)[0]
        return cost_of(self._sizes_at(candidate.tp), *self._shape(candidate, batch), *passes)

    def _shape(self, candidate: Candidate, batch: int | None = None) -> tuple[Candidate, Hardware, int, int]:
        """Returns what a price depends on besides sizes: devices as the candidate joins them, rows and positions."""
        asked, ranks = self.request, candidate.ranks
        joined = self._once(("joined", ranks), lambda: asked.hardware.joining(ranks))
        return candidate, joined, batch or asked.batch, asked.seq

    def least(self, candidate: Candidate, batch: int | None = None) -> Memory | None:
        """Memory of the fullest rank with blocks dealt out evenly, all computed again that may be; None if that is no
        cut."""
        found = self.cutter(candidate, inf, whole=True, batch=batch).even()
        return None if found is None else self._memory(candidate, found, batch)

    def cutter(self, candidate: Candidate, limit: float, *, whole: bool = False, batch: int | None = None) -> Cutter:
        """Returns the cutter of the model's parts under a candidate; `whole` computes every block again, if any."""
        again: bool | str = "all" if whole and candidate.checkpointing else candidate.checkpointing
        parts, one = self._priced(candidate, batch), candidate
        kind = Interleaved if one.virtual > 1 else Cutter
        return kind(parts, one.pp, one.microbatches, limit, again, one.virtual)

    def exactly(self, candidate: Candidate, *, whole: bool, below: float = inf) -> Estimate | None:
        """Prices the best cut with the fewest blocks computed again, all of them or the modules that are the fastest;
        None if nothing fits in `below` seconds."""
        best = None
        for way in ways(self.request.structure, candidate, self.request.pin, self.request.forbid):
            if (found := self._cut(way, whole, below)) is not None:
                best, below = found, min(below, found.cost.total * (1 - ROUNDING))
                if not found.candidate.checkpointing:
                    break
            if self.request.objective == "memory":
                break
        return best

    def _cut(self, candidate: Candidate, whole: bool, below: float) -> Estimate | None:
        """Cuts a candidate that says what is computed again."""
        limit = self.request.limit - self._working(candidate)
        if self._least_held(candidate) > limit * candidate.pp:
            return None
        rough, cutter = self._rough(candidate), self.cutter(candidate, limit, whole=whole)
        if self.request.objective == "time":
            found = cutter.best(below - _apart(rough, candidate))
        else:
            found = cutter.even() or cutter.best()
        return None if found is None else self._estimate(candidate, rough, found)

    def _least_held(self, candidate: Candidate) -> int:
        """Bytes of all ranks together whatever the cut, with one microbatch in flight and all computed again that may
        be."""
        counts = self._kinds(candidate)[2]
        parts = enumerate(self._each_kind(candidate, None))
        return sum((part.static + part.kept - part.again[1]) * counts[kind] for kind, part in parts)

    def bound(self, candidate: Candidate, *, whole: bool) -> float:
        """Seconds that no cut of the candidate is below, but for rounding."""
        if candidate.checkpointing and not whole:  # it may compute nothing again
            candidate = replace(candidate, checkpointing=False, inside=())
        return self._once(("bound", candidate), lambda: self._bound(candidate))

    def _bound(self, candidate: Candidate) -> float:
        rough, parts, anew = self._rough(candidate), self._pass(candidate)[1], self._anew(candidate)[1]
        each = [part.both + more.busy for part, more in zip(parts, anew)]
        counts = self._kinds(candidate)[2]
        total = sum(seconds * counts[kind] for kind, seconds in enumerate(each))
        longest = max(part.both for part in parts)
        bound = bound_of(total, longest, candidate.pp, candidate.microbatches, candidate.virtual)
        return (bound + _apart(rough, candidate)) * (1 - ROUNDING)

    def _pass(self, candidate: Candidate, batch: int | None = None) -> tuple[Pass, list[Pass]]:
        """Passes of the whole model, and of each kind of part."""
        return self._passed(pass_of, (), candidate, batch)

    def _anew(self, candidate: Candidate, batch: int | None = None) -> tuple[Pass, list[Pass]]:
        """The same, of what is computed again."""
        return self._passed(again_of, (candidate.checkpointing, candidate.inside), candidate, batch)

    def _passed(
        self, price: Callable[..., Pass], by: tuple, candidate: Candidate, batch: int | None
    ) -> tuple[Pass, list[Pass]]:
        """What `price` gives, which depends on `by` too."""
        shape = self._shape(candidate, batch)
        key = (price, *by, *self._axes(candidate), positions_of(candidate, *shape[2:]))
        every = (self._sizes_at(candidate.tp), *self._kinds(candidate)[0])
        whole, *kinds = self._once(key, lambda: [price(one, *shape) for one in every])
        return whole, kinds

    def _keeps(self, candidate: Candidate, batch: int) -> list[tuple[int, int, Mapping[str, int]]]:
        """Per kind of part: bytes that it keeps for backward with nothing computed again, without a pipeline the loss
        among them, how many fewer with what the candidate computes again, and what a pipeline's stage holds at its
        ends, by the fields of `Part`."""
        again, staged = (candidate.checkpointing, candidate.inside), candidate.pp > 1
        _, *shape = self._shape(candidate, batch)
        key = ("keeps", *self._axes(candidate), *again, staged, positions_of(candidate, *shape[1:]))

        def keeps(one: Sizes) -> tuple[int, int, Mapping[str, int]]:
            plain = replace(candidate, checkpointing=False, inside=())
            held = [Held(one, way, *shape, part=True) for way in (plain, candidate)]
            kept, left = (int(each.kept() + (0 if staged else each.loss())) for each in held)
            return kept, kept - left, held[1].at_ends() if staged else {}

        return self._once(key, lambda: [keeps(one) for one in self._kinds(candidate)[0]])

    def _axes(self, candidate: Candidate) -> tuple:
        """Returns the key that, with positions, decides on the passes of parts."""
        degrees = (candidate.tp, candidate.cp, candidate.ep, candidate.sp, candidate.ranks)
        return (*degrees, self._staged(candidate))

    def _staged(self, candidate: Candidate) -> bool:
        """True if several stages may hold one parameter."""
        return self._shared and candidate.pp > 1

    def _kinds(self, candidate: Candidate) -> tuple[list[Sizes], list[int], Counter[int]]:
        """The parts that differ, which of them each part is, and how many are alike."""
        key = (candidate.tp, self._staged(candidate))

        def parts() -> tuple[list[Sizes], list[int], Counter[int]]:
            kinds: list[Sizes] = []
            of = []
            for one in parts_of(self.request.structure, *key):
                if one not in kinds:
                    kinds.append(one)
                of.append(kinds.index(one))
            return kinds, of, Counter(of)

        return self._once(("kinds", *key), parts)

    def _sizes_at(self, tp: int) -> Sizes:
        return self._once(("sizes", tp), lambda: sizes_of(self.request.structure, tp))

    def _priced(self, candidate: Candidate, batch: int | None) -> list[Part]:
        priced, of = self._each_kind(candidate, batch), self._kinds(candidate)[1]
        fixed = {kind: replace(priced[kind], cuttable=False) for kind, able in zip(of, self._cuttable) if not able}
        return [priced[kind] if cuttable else fixed[kind] for kind, cuttable in zip(of, self._cuttable)]

    def _each_kind(self, candidate: Candidate, batch: int | None) -> list[Part]:
        rows = batch or self.request.batch
        times, anew = self._pass(candidate, batch)[1], self._anew(candidate, batch)[1]
        priced = []
        statics, keeps = self._static(candidate), self._keeps(candidate, rows)
        for time, more, (static, fresh), (kept, less, ends) in zip(times, anew, statics, keeps):
            again = (float(f"{more.busy:.9g}"), less) if candidate.checkpointing else (0.0, 0)  # equal of equal blocks
            priced.append(Part(time.both, static, kept, again, fresh=fresh, **ends))
        return priced

    def _static(self, candidate: Candidate) -> list[tuple[int, int]]:
        """Bytes that each kind of part holds whatever runs, of rows or positions none, and those of gradients that a
        pipeline adds."""
        one = candidate
        degrees = (one.pp, one.dp, one.tp, one.ep, one.cp, one.zero, one.offload, one.microbatches > 1)
        held = (Held(kind, *self._shape(one), part=True) for kind in self._kinds(one)[0])
        key = ("static", *degrees, self._staged(one))
        return self._once(key, lambda: [(each.static(), each.fresh()) for each in held])

    def _working(self, candidate: Candidate, batch: int | None = None) -> int:
        """Bytes at the worst moment beyond what parts hold whatever runs, and keep for backward."""
        held = Held(self._sizes_at(candidate.tp), *self._shape(candidate, batch))
        if candidate.pp > 1:
            return held.working()
        return held.alone().total - held.static() - int(held.kept() + held.loss())

    def _estimate(self, candidate: Candidate, rough: Cost, found: Stages) -> Estimate:
        scale = found.longest * candidate.microbatches / rough.busy if rough.busy else 1.0
        cost = replace(
            rough,
            **{name: getattr(rough, name) * scale for name in BUSY},
            pipeline=rough.pipeline - _bubble(rough, candidate) + found.waiting,
        )
        memory = self._memory(candidate, found)
        again = tuple(name for at, name in enumerate(self._names) if at in found.again)
        if not again and candidate.checkpointing:  # it may compute blocks again, and need not
            candidate = replace(candidate, checkpointing=False, inside=())
            memory = self._memory(candidate, found)
        return Estimate(candidate, cost, memory, tuple(self._names[at] for at in found.starts[1:]), again)

    def _memory(self, candidate: Candidate, found: Stages, batch: int | None = None) -> Memory:
        """Memory of the fullest rank of a cut, by kind."""
        kinds, of, _ = self._kinds(candidate)
        shape = self._shape(candidate, batch)
        held = [Held(kinds[of[at]], *shape, part=True) for at in found.held(len(self._cuttable))]
        parameters, states, gradients = (
            sum(sizes) for sizes in zip(*((one.parameters(), one.states(), one.summed()) for one in held))
        )
        gradients += found.gradients
        gathered = sum(one.unsharded() for one in held) if candidate.pp > 1 else 0
        kept = found.memory - parameters - states - gradients - gathered
        if candidate.pp == 1 and len(found.again) in (0, len(held)):
            return self.evenly(candidate, batch).memory  # at its worst moment
        return Memory(parameters, gradients, states, kept, self._working(candidate, batch) + gathered)


def _apart(cost: Cost, candidate: Candidate) -> float:
    """Seconds of a step that no cut changes: data parallelism, the optimizer, transfers between stages."""
    return cost.total - cost.busy - _bubble(cost, candidate)


def _bubble(cost: Cost, candidate: Candidate) -> float:
    return cost.busy / candidate.microbatches * (candidate.pp - 1) / candidate.virtual
