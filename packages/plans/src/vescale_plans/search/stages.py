"""Stages: where a pipeline is cut, and which blocks are computed again, at least time within a memory limit.

Exact, for what cost and memory say of the parts of a model (one per repeated block), both of which add up over parts.
A rank's step takes its own stage once per microbatch, and the first microbatch passes through all others before or
after: sum of the stages' times + (microbatches - 1) * the longest. A stage keeps activations of as many microbatches
as there are stages from it on (1F1B: Narayanan et al., arXiv 2104.04473, section 2.2), so the last ones may hold more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import ceil, inf

MOST_KINDS = 3
"""Blocks that differ more than this recompute all or nothing per stage."""


@dataclass(frozen=True)
class Part:
    """A part of a model as one rank has it.

    Arguments:
        time: seconds per microbatch, forward and backward.
        static: bytes whatever runs: parameters, gradients, states.
        kept: bytes of activations per microbatch in flight.
        again: seconds more, and bytes less, when it is computed again in backward.
        cuttable: a stage may begin here.
    """

    time: float
    static: int
    kept: int
    again: tuple[float, int] = (0.0, 0)
    cuttable: bool = True


@dataclass(frozen=True)
class Stages:
    """A cut.

    Arguments:
        starts: the part that begins each stage.
        again: parts that are computed again.
        total: seconds of one microbatch through all stages.
        longest: of these, the longest stage's; of interleaved stages the longest of each lap, together.
        memory: bytes of the fullest rank.
        fullest: that rank, which is also its first stage.
        virtual: stages per rank.
    """

    starts: tuple[int, ...]
    again: frozenset[int]
    total: float
    longest: float
    memory: int
    fullest: int
    virtual: int = 1

    @property
    def waiting(self) -> float:
        """Seconds of a step in which the busiest rank has nothing to do."""
        return (self.total - self.longest) / self.virtual

    def seconds(self, microbatches: int) -> float:
        """Of one step, transfers aside."""
        return self.total / self.virtual + (microbatches - 1 / self.virtual) * self.longest

    def held(self, parts: int) -> list[int]:
        """Of so many parts, those of the fullest rank."""
        bounds, ranks = [*self.starts, parts], len(self.starts) // self.virtual
        stages = range(self.fullest, len(self.starts), ranks)
        return [at for stage in stages for at in range(*bounds[stage : stage + 2])]


@dataclass(frozen=True)
class _Stage:
    time: float
    memory: int
    again: Mapping[tuple[float, int], int]


def ahead(ranks: int, virtual: int, rank: int) -> int:
    """Forwards, each of one microbatch through one stage, whose backwards are to come, at most on a rank: under 1F1B,
    and with several stages per rank interleaved."""
    return (virtual - 1) * ranks + 2 * (ranks - 1 - rank) + 1 if virtual > 1 else ranks - rank


def bound_of(total: float, longest: float, count: int, microbatches: int, virtual: int = 1) -> float:
    """Seconds of a step that no cut over `count` ranks is below: of parts that take `total` per microbatch, and the
    `longest` of them."""
    return total / virtual + (microbatches - 1 / virtual) * max(total / count, longest)


class Cutter:
    """Cuts `parts` in `count` stages.

    Arguments:
        parts: in order.
        count: stages.
        microbatches: of one step.
        limit: bytes of one rank.
        again: parts may be computed again, as few as fit; "all" for all of them.
    """

    def __init__(
        self, parts: Sequence[Part], count: int, microbatches: int, limit: float, again: bool | str = False
    ) -> None:
        self.parts, self.count, self.microbatches, self.limit, self.again = parts, count, microbatches, limit, again
        self._time = [0.0, *accumulate(part.time for part in parts)]
        self._static = [0, *accumulate(part.static for part in parts)]
        self._kept = [0, *accumulate(part.kept for part in parts)]
        kinds = sorted({part.again for part in parts} - {(0.0, 0)})
        self._kinds = {kind: [0, *accumulate(int(part.again == kind) for part in parts)] for kind in kinds}
        self._starts = [*accumulate((int(part.cuttable) for part in reversed(parts[1:])), initial=0)][::-1]
        self._known: dict[tuple[int, int, int], _Stage | None] = {}

    def best(self, below: float = inf) -> Stages | None:
        """The fastest cut that fits; None where none does in at most `below` seconds a step."""
        size = len(self.parts)
        even = self.even()
        best = min(below, inf if even is None else even.seconds(self.microbatches)) * (1 + 1e-12)
        front: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {0: [(0.0, 0.0, ())]}
        for number in range(self.count):
            grown: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {}
            last = number == self.count - 1
            for start, ways in front.items():
                for stop in (size,) if last else self._stops(start, number):
                    if self._beyond(self._time[stop] - self._time[start], best):
                        break
                    left = self._time[size] - self._time[stop]
                    share = left / max(1, self.count - number - 1)
                    if self._beyond(share, best):
                        continue
                    if (stage := self.stage(number, start, stop)) is None:
                        break
                    for total, longest, starts in ways:
                        made = (total + stage.time, max(longest, stage.time), (*starts, start))
                        least = made[0] + left + (self.microbatches - 1) * max(made[1], share)
                        if least <= best:
                            grown.setdefault(stop, []).append(made)
            front = {stop: _front(ways) for stop, ways in grown.items()}
        ends = front.get(size, [])
        if not ends:
            return None
        total, longest, starts = min(ends, key=lambda way: (way[0] + (self.microbatches - 1) * way[1], way[2]))
        return self.made(starts)

    def _beyond(self, longest: float, best: float) -> bool:
        """Whether a cut with a stage that long takes more than `best`."""
        return self._time[-1] + (self.microbatches - 1) * longest > best

    def even(self) -> Stages | None:
        """Parts dealt out evenly; None where that is no cut, or does not fit."""
        size = len(self.parts)
        starts = tuple(number * size // self.count for number in range(self.count))
        return self.made(starts)

    def made(self, starts: Sequence[int]) -> Stages | None:
        """The cut at these parts, with the least that is computed again; None where it is none, or does not fit."""
        bounds = [*starts, len(self.parts)]
        if len(set(bounds)) < len(bounds) or not all(self.parts[start].cuttable for start in starts[1:]):
            return None
        stages = [self.stage(at, *bounds[at : at + 2]) for at in range(len(starts))]
        if None in stages:
            return None
        again: set[int] = set()
        for stage, first, past in zip(stages, bounds, bounds[1:]):
            for kind, number in stage.again.items():
                again.update([at for at in range(first, past) if self.parts[at].again == kind][:number])
        fullest = max(range(len(stages)), key=lambda at: stages[at].memory)
        return Stages(
            tuple(starts),
            frozenset(again),
            sum(stage.time for stage in stages),
            max(stage.time for stage in stages),
            stages[fullest].memory,
            fullest,
        )

    def stage(self, number: int, start: int, stop: int) -> _Stage | None:
        """Stage `number` of the parts [start, stop), with the least computed again; None where it does not fit."""
        flight = min(self.microbatches, ahead(self.count, 1, number))
        key = (flight, start, stop)
        if key not in self._known:
            self._known[key] = self._stage(flight, start, stop)
        return self._known[key]

    def _stage(self, flight: int, start: int, stop: int) -> _Stage | None:
        static = self._static[stop] - self._static[start]
        kept = self._kept[stop] - self._kept[start]
        time = self._time[stop] - self._time[start]
        over = static + flight * kept - self.limit
        if not self.again or (over <= 0 and self.again != "all"):
            return _Stage(time, static + flight * kept, {}) if over <= 0 else None
        counts = {kind: n for kind, sums in self._kinds.items() if (n := sums[stop] - sums[start])}
        chosen = counts if self.again == "all" else self._chosen(counts, ceil(over / flight))
        if chosen is None:
            return None
        time += sum(extra * number for (extra, _), number in chosen.items())
        memory = static + flight * (kept - sum(less * number for (_, less), number in chosen.items()))
        return _Stage(time, memory, chosen) if memory <= self.limit else None

    @staticmethod
    def _chosen(counts: Mapping[tuple[float, int], int], wanted: int) -> Mapping[tuple[float, int], int] | None:
        """How many of each kind are computed again to save `wanted` bytes, in the least time."""
        if sum(less * number for (_, less), number in counts.items()) < wanted:
            return None
        *others, (extra, less) = counts
        ways = product(*(range(counts[kind] + 1) for kind in others)) if len(counts) <= MOST_KINDS else ()
        best = (sum(kind[0] * number for kind, number in counts.items()), dict(counts))
        for numbers in ways:
            rest = wanted - sum(kind[1] * number for kind, number in zip(others, numbers))
            number = max(0, ceil(rest / less)) if less > 0 else 0
            if number > counts[extra, less] or (less <= 0 and rest > 0):
                continue
            time = sum(kind[0] * number for kind, number in zip(others, numbers)) + extra * number
            if time < best[0]:
                best = (time, {**dict(zip(others, numbers)), (extra, less): number})
        return {kind: number for kind, number in best[1].items() if number}

    def _stops(self, start: int, number: int) -> Iterator[int]:
        """Where stage `number` that begins at `start` may end, leaving a start for each later one; nearest first."""
        for stop in range(start + 1, len(self.parts)):
            if self.parts[stop].cuttable and self._starts[stop] >= self.count - number - 2:
                yield stop


def _front(ways: list[tuple[float, float, tuple[int, ...]]]) -> list[tuple[float, float, tuple[int, ...]]]:
    """Those that no other one is at least as good as, in both times."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for way in sorted(ways):
        if not kept or way[1] < kept[-1][1]:
            kept.append(way)
    return kept
