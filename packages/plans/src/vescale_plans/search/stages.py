"""Stages: where a pipeline is cut, and which blocks are computed again, at least time within a memory limit.

Exact, for what cost and memory say of the parts of a model (one per repeated block), both of which add up over parts.
A rank's step takes its own stage once per microbatch, and the first microbatch passes through all others before or
after: sum of the stages' times + (microbatches - 1) * the longest. A stage keeps activations of as many microbatches
as there are stages from it on (1F1B: Narayanan et al., arXiv 2104.04473, section 2.2), so the last ones may hold more.

The fullest moment is the beginning or the end of a backward. As it goes on, activations of its microbatch end and its
gradients come, which are added to the sums of those before when it is through:

    begins   activations of all in flight, what the last part's backward takes, sums of the gradients
    ends     activations of one fewer, what the first part's backward takes, sums, and as many gradients again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import ceil, inf
from operator import le
from typing import NamedTuple

Kind = tuple[float, int]
"""See `Part.again`."""
MOST_KINDS = 3
"""Blocks that differ more than this recompute all or nothing per stage."""


@dataclass(frozen=True)
class Part:
    """A part of a model as one rank has it.

    Arguments:
        time: seconds per microbatch, forward and backward.
        static: bytes whatever runs: parameters, states, gradients where these are there from the start.
        kept: bytes of activations per microbatch in flight.
        again: seconds more, and bytes less, when it is computed again in backward.
        cuttable: a stage may begin here.
        received: bytes per microbatch of what it is given, held by a stage that begins here.
        begins, ends: bytes more when the backward of a stage begins that it is the last part of, and before that of
            one ends that it is the first part of.
        fresh: bytes of one microbatch's gradients, where these come with the backward.
    """

    time: float
    static: int
    kept: int
    again: tuple[float, int] = (0.0, 0)
    cuttable: bool = True
    received: int = 0
    begins: int = 0
    ends: int = 0
    fresh: int = 0


class Load(NamedTuple):
    """Bytes of a stage beyond what is static: kept per microbatch in flight; the others as of `Part`."""

    kept: int
    begins: int = 0
    ends: int = 0
    fresh: int = 0


class Moment(NamedTuple):
    """A rank before a backward.

    Arguments:
        flight: microbatches whose activations each of its stages keeps.
        summed: whether a backward of each stage went before.
        stage: of the backward, among the rank's.
    """

    flight: tuple[int, ...]
    summed: tuple[bool, ...]
    stage: int


class Total(NamedTuple):
    """Bytes at a moment, of these gradients, and of how many microbatches each stage's activations are in them."""

    total: int
    gradients: int
    flight: tuple[int, ...]


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
        gradients: of these bytes, those of gradients that come with backwards.
    """

    starts: tuple[int, ...]
    again: frozenset[int]
    total: float
    longest: float
    memory: int
    fullest: int
    virtual: int = 1
    gradients: int = 0

    @property
    def waiting(self) -> float:
        """Seconds of a step in which the busiest rank has nothing to do."""
        return (self.total - self.longest) / self.virtual

    def seconds(self, microbatches: int) -> float:
        """Seconds of one step, transfers aside."""
        return self.total / self.virtual + (microbatches - 1 / self.virtual) * self.longest

    def held(self, parts: int) -> list[int]:
        """Returns the parts of the fullest rank, of so many."""
        bounds, ranks = [*self.starts, parts], len(self.starts) // self.virtual
        stages = range(self.fullest, len(self.starts), ranks)
        return [at for stage in stages for at in range(*bounds[stage : stage + 2])]


@dataclass(frozen=True)
class _Stage:
    time: float
    memory: int
    again: Mapping[tuple[float, int], int]
    gradients: int = 0


def ahead(ranks: int, virtual: int, rank: int) -> int:
    """Forwards, each of one microbatch through one stage, whose backwards are to come, at most on a rank: under 1F1B,
    and with several stages per rank interleaved."""
    return (virtual - 1) * ranks + 2 * (ranks - 1 - rank) + 1 if virtual > 1 else ranks - rank


@lru_cache(maxsize=4096)
def moments(ranks: int, virtual: int, microbatches: int, rank: int) -> tuple[Moment, ...]:
    """Returns the moments at which a rank may be the fullest; with several stages per rank, microbatches are whole
    rounds of `ranks`.

    The rank runs `ahead`, and then a backward follows each forward, as long as there are any: which stages these are of
    repeats itself with every `ranks * virtual`, and what is kept grows or falls evenly where neither changes its stage.
    Gradients come with the first backward of a stage, and are there twice after its second.
    """
    every, lap = virtual * microbatches, ranks * virtual
    alive = min(every, ahead(ranks, virtual, rank))
    last = min(every - alive, 2 * lap)
    turns = {*range(0, max(last, lap) + 1, ranks), *range(-alive % ranks, last + 1, ranks), last}
    befores = {at for turn in turns for at in (turn - 1, turn, turn + 1)}

    def done(count: int, place: int) -> int:
        """Counts a stage's share of the first `count` forwards, or backwards, by its place."""
        laps, rest = divmod(count, lap)
        return laps * ranks + min(ranks, max(0, rest - place * ranks))

    found = []
    for at in sorted(befores):
        if 0 <= at < every:
            back = [done(at, virtual - 1 - one) for one in range(virtual)]
            ahead_of = [done(min(every, alive + at), one) for one in range(virtual)]
            flight = tuple(made - gone for made, gone in zip(ahead_of, back))
            found.append(Moment(flight, tuple(map(bool, back)), virtual - 1 - at // ranks % virtual))
    return tuple(one for one in dict.fromkeys(found) if not any(_is_within(one, other) for other in found))


def _is_within(one: Moment, other: Moment) -> bool:
    """True if one holds nothing that the other, a different one, does not."""
    if one == other or one.stage != other.stage:
        return False
    return all(map(le, one.flight, other.flight)) and all(map(le, one.summed, other.summed))


def held_at(loads: Sequence[Load], among: Sequence[Moment]) -> Iterator[Total]:
    """Yields what a rank with these stages holds when backwards begin and when they end, beyond what is static."""
    for flight, summed, stage in among:
        one, kept, gradients = loads[stage], 0, 0
        for load, count, there in zip(loads, flight, summed):
            kept += count * load.kept
            gradients += load.fresh * there
        kept += gradients
        yield Total(kept + one.begins, gradients, flight)
        if one.ends or one.fresh:
            left = (*flight[:stage], flight[stage] - 1, *flight[stage + 1 :])
            yield Total(kept - one.kept + one.ends + one.fresh, gradients + one.fresh, left)


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
        virtual: of `Interleaved`.
    """

    def __init__(
        self, parts: Sequence[Part], count: int, microbatches: int, limit: float, again: bool | str = False,
        virtual: int = 1,
    ) -> None:  # fmt: skip
        self.parts, self.count, self.microbatches, self.limit, self.again = parts, count, microbatches, limit, again
        self.virtual, self.stages = virtual, count * virtual
        self._time = [0.0, *accumulate(part.time for part in parts)]
        self._static = [0, *accumulate(part.static for part in parts)]
        self._kept = [0, *accumulate(part.kept for part in parts)]
        self._fresh = [0, *accumulate(part.fresh for part in parts)]
        kinds = sorted({part.again for part in parts} - {(0.0, 0)})
        self._kinds = {kind: [0, *accumulate(int(part.again == kind) for part in parts)] for kind in kinds}
        self._starts = [*accumulate((int(part.cuttable) for part in reversed(parts[1:])), initial=0)][::-1]
        self._known: dict[tuple[int, int, int], _Stage | None] = {}

    def best(self, below: float = inf) -> Stages | None:
        """The fastest cut that fits; None if none does in at most `below` seconds a step."""
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
        """True if a cut with a stage that long takes more than `best`."""
        return self._time[-1] + (self.microbatches - 1) * longest > best

    def even(self) -> Stages | None:
        """Parts dealt out evenly by number; None if that is no cut, or does not fit."""
        return self.made(self._by_number())

    def _by_number(self) -> tuple[int, ...]:
        return tuple(stage * len(self.parts) // self.stages for stage in range(self.stages))

    def made(self, starts: Sequence[int]) -> Stages | None:
        """The cut at these parts, with the least that is computed again; None if it is none, or does not fit."""
        bounds = [*starts, len(self.parts)]
        if any(start >= stop for start, stop in pairwise(bounds)):
            return None
        return self._made(starts, bounds) if all(self.parts[start].cuttable for start in starts[1:]) else None

    def _made(self, starts: Sequence[int], bounds: Sequence[int]) -> Stages | None:
        stages = [self.stage(at, *bounds[at : at + 2]) for at in range(len(starts))]
        if None in stages:
            return None
        spans = [range(first, past) for first, past in pairwise(bounds)]
        again = frozenset(self._first(spans, [stage.again for stage in stages]))
        fullest = max(range(len(stages)), key=lambda at: stages[at].memory)
        return Stages(
            tuple(starts),
            again,
            sum(stage.time for stage in stages),
            max(stage.time for stage in stages),
            stages[fullest].memory,
            fullest,
            gradients=stages[fullest].gradients,
        )

    def stage(self, number: int, start: int, stop: int) -> _Stage | None:
        """Stage `number` of the parts [start, stop), with the least computed again; None if it does not fit."""
        flight = min(self.microbatches, ahead(self.count, 1, number))
        key = (flight, start, stop)
        if key not in self._known:
            self._known[key] = self._stage(moments(self.count, 1, self.microbatches, number), start, stop)
        return self._known[key]

    def _stage(self, among: Sequence[Moment], start: int, stop: int) -> _Stage | None:
        static, load = self._static[stop] - self._static[start], self._load(start, stop)
        time = self._time[stop] - self._time[start]
        found = max(held_at((load,), among))
        over = static + found.total - self.limit
        if not self.again or (over <= 0 and self.again != "all"):
            return _Stage(time, static + found.total, {}, found.gradients) if over <= 0 else None
        counts = {kind: n for kind, sums in self._kinds.items() if (n := sums[stop] - sums[start])}
        chosen: Mapping[tuple[float, int], int] | None = counts
        if self.again != "all":
            wanted = [self._wanted(static + one.total - self.limit, *one.flight) for one in held_at((load,), among)]
            chosen = self._chosen(counts, max(wanted))
        if chosen is None:
            return None
        time += sum(extra * number for (extra, _), number in chosen.items())
        less = sum(less * number for (_, less), number in chosen.items())
        found = max(held_at((load._replace(kept=load.kept - less),), among))
        memory = static + found.total
        return _Stage(time, memory, chosen, found.gradients) if memory <= self.limit else None

    def _load(self, start: int, stop: int) -> Load:
        first, last = self.parts[start], self.parts[stop - 1]
        kept, fresh = (sums[stop] - sums[start] for sums in (self._kept, self._fresh))
        return Load(kept + first.received, last.begins, first.ends, fresh)

    def _first(self, spans: Sequence[range], chosen: Sequence[Mapping[Kind, int]]) -> Iterator[int]:
        """Yields as many parts of each kind as were chosen."""
        for span, kinds in zip(spans, chosen):
            for kind, number in kinds.items():
                yield from [at for at in span if self.parts[at].again == kind][:number]

    @staticmethod
    def _wanted(over: float, flight: int) -> float:
        """Bytes per microbatch that are to be saved, where so many too many are held with so many in flight."""
        return ceil(over / flight) if flight else inf if over > 0 else 0

    @staticmethod
    def _chosen(counts: Mapping[tuple[float, int], int], wanted: float) -> Mapping[tuple[float, int], int] | None:
        """Returns how many of each kind are computed again to save `wanted` bytes, in the least time."""
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
        """Yields the ends of stage `number` that begins at `start`, leaving a start for each later one; nearest
        first."""
        for stop in range(start + 1, len(self.parts)):
            if self.parts[stop].cuttable and self._starts[stop] >= self.count - number - 2:
                yield stop


def _front(ways: list[tuple[float, float, tuple[int, ...]]]) -> list[tuple[float, float, tuple[int, ...]]]:
    """Returns the ways that no other one is at least as good as, in both times."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for way in sorted(ways):
        if not kept or way[1] < kept[-1][1]:
            kept.append(way)
    return kept
