"""Interleaved stages: a model dealt out over ranks that hold several stages each, what a step of them takes, and holds.

Rank r of p holds the stages r, p + r, ... (Narayanan et al., arXiv 2104.04473, section 2.2): v laps of p stages. The
schedule takes p microbatches through one lap after another, so that ranks which are busy with the same lap wait for its
longest stage: a step takes `microbatches` times these longest stages together, and before and after that a v-th of what
the other stages take. With one lap that is 1F1B, see `stages`. Simulated, uneven stages took up to 6% longer and up to
18% less (`test_interleaved.py` of vescale).

How parts are dealt out is not searched: evenly by number or by time, whichever is faster.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil, inf

from ..stages import Part, Stages, ahead

Kind = tuple[float, int]
"""See `Part.again`."""


@lru_cache(maxsize=4096)
def flights(ranks: int, virtual: int, microbatches: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Microbatches whose activations each stage of a rank keeps, at every moment that may be the fullest; microbatches
    are whole rounds of `ranks`.

    The rank runs `ahead`, and then a backward follows each forward: which stages these are of repeats itself
    with every `ranks * virtual`, and what is kept grows or falls evenly where neither changes its stage.
    """
    every = virtual * microbatches
    alive = min(every, ahead(ranks, virtual, rank))
    last = min(every - alive, ranks * virtual)
    moments = {*range(0, last + 1, ranks), *range(-alive % ranks, last + 1, ranks), last}

    def done(count: int, place: int) -> int:
        """Of the first `count` forwards, or backwards, those of the stage that comes at this place."""
        laps, rest = divmod(count, ranks * virtual)
        return laps * ranks + min(ranks, max(0, rest - place * ranks))

    stages = range(virtual)
    kept = {tuple(done(alive + at, one) - done(at, virtual - 1 - one) for one in stages) for at in moments}
    return tuple(sorted(kept))


class Interleaved:
    """Deals `parts` out over `count` ranks with `virtual` stages each; as `Cutter` otherwise.

    Arguments:
        microbatches: of one step, a multiple of `count`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        count: int,
        virtual: int,
        microbatches: int,
        limit: float,
        again: bool | str = False,
    ) -> None:
        self.parts, self.count, self.virtual, self.microbatches = parts, count, virtual, microbatches
        self.limit, self.again = limit, again
        self._time = [0.0, *accumulate(part.time for part in parts)]
        self._static = [0, *accumulate(part.static for part in parts)]
        self._kept = [0, *accumulate(part.kept for part in parts)]

    def best(self, below: float = inf) -> Stages | None:
        """The faster deal that fits; None where none does in at most `below` seconds a step."""
        found = None
        for starts in dict.fromkeys((self._by_time(), self._by_number())):
            if self._seconds(self._times(starts)) > below or (one := self.made(starts)) is None:
                continue
            if (seconds := one.seconds(self.microbatches)) <= below:  # with what it computes again
                below, found = seconds, one
        return found

    def even(self) -> Stages | None:
        """Parts dealt out evenly by number; None where that is no cut, or does not fit."""
        return self.made(self._by_number())

    def made(self, starts: Sequence[int]) -> Stages | None:
        """The cut at these parts, with little that is computed again; None where it is none, or does not fit."""
        bounds = [*starts, len(self.parts)]
        if any(start >= stop for start, stop in pairwise(bounds)):
            return None
        if not all(self.parts[start].cuttable for start in starts[1:]):
            return None
        again: set[int] = set()
        sizes = []
        for rank in range(self.count):
            spans = [range(*bounds[at : at + 2]) for at in range(rank, len(starts), self.count)]
            if (fitted := self._fitted(rank, spans)) is None:
                return None
            sizes.append(fitted[0])
            again.update(fitted[1])
        times = self._times(starts)
        for at in again:
            times[bisect_right(starts, at) - 1] += self.parts[at].again[0]
        fullest = max(range(self.count), key=sizes.__getitem__)
        longest = self._longest(times)
        return Stages(tuple(starts), frozenset(again), sum(times), longest, sizes[fullest], fullest, self.virtual)

    def _fitted(self, rank: int, spans: Sequence[range]) -> tuple[int, set[int]] | None:
        """Bytes of a rank with these stages, and the parts that are computed again: those that save most for their time
        at the fullest moment. None where it does not fit."""
        static = sum(self._static[span.stop] - self._static[span.start] for span in spans)
        kept = [self._kept[span.stop] - self._kept[span.start] for span in spans]
        moments = flights(self.count, self.virtual, self.microbatches, rank)
        left = [Counter(self.parts[at].again for at in span) if self.again else Counter() for span in spans]
        chosen: list[Counter[Kind]] = [Counter() for _ in spans]

        def choose(stage: int, kind: Kind, number: int) -> None:
            left[stage][kind] -= number
            chosen[stage][kind] += number
            kept[stage] -= number * kind[1]

        if self.again == "all":
            for stage, kinds in enumerate(left):
                for kind, number in list(kinds.items()):
                    choose(stage, kind, number)
        while True:
            size, moment = max((_sum(moment, kept), moment) for moment in moments)
            over = static + size - self.limit
            if over <= 0:
                return static + size, set(self._first(spans, chosen))
            ways = [
                (moment[stage] * kind[1] / max(kind[0], 1e-30), -stage, kind)
                for stage, kinds in enumerate(left)
                for kind, number in kinds.items()
                if number and moment[stage] * kind[1] > 0
            ]
            if not ways:
                return None
            _, stage, kind = max(ways)
            choose(-stage, kind, min(left[-stage][kind], ceil(over / (moment[-stage] * kind[1]))))

    def _first(self, spans: Sequence[range], chosen: Sequence[Counter[Kind]]) -> Iterator[int]:
        """As many parts of each kind as were chosen."""
        for span, kinds in zip(spans, chosen):
            for kind, number in kinds.items():
                yield from [at for at in span if self.parts[at].again == kind][:number]

    def _times(self, starts: Sequence[int]) -> list[float]:
        """Seconds of each stage for a microbatch, with nothing computed again."""
        return [self._time[stop] - self._time[start] for start, stop in pairwise([*starts, len(self.parts)])]

    def _longest(self, times: Sequence[float]) -> float:
        """Of each lap the longest stage, together."""
        return sum(max(times[lap : lap + self.count]) for lap in range(0, len(times), self.count))

    def _seconds(self, times: Sequence[float]) -> float:
        longest = self._longest(times)
        return sum(times) / self.virtual + (self.microbatches - 1 / self.virtual) * longest

    def _by_number(self) -> tuple[int, ...]:
        stages = self.count * self.virtual
        return tuple(stage * len(self.parts) // stages for stage in range(stages))

    def _by_time(self) -> tuple[int, ...]:
        """Each stage begins at the boundary of parts that is nearest to its share of the time."""
        stages, size = self.count * self.virtual, len(self.parts)
        starts, at = [0], 0
        for stage in range(1, stages):
            wanted = self._time[-1] * stage / stages
            at += 1
            while at < size - (stages - stage) and self._time[at + 1] - wanted < wanted - self._time[at]:
                at += 1
            starts.append(at)
        return tuple(starts)


def _sum(moment: Sequence[int], kept: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(moment, kept))
