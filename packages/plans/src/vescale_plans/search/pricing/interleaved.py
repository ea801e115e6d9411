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
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf

from ..stages import Cutter, Kind, Stages, held_at, moments


class Interleaved(Cutter):
    """Deals `parts` out over `count` ranks with `virtual` stages each; as `Cutter` otherwise.

    Arguments:
        microbatches: of one step, a multiple of `count`.
    """

    def best(self, below: float = inf) -> Stages | None:
        """The faster deal that fits; None if none does in at most `below` seconds a step."""
        found = None
        for starts in dict.fromkeys((self._by_time(), self._by_number())):
            if self._seconds(self._times(starts)) > below or (one := self.made(starts)) is None:
                continue
            if (seconds := one.seconds(self.microbatches)) <= below:  # with what it computes again
                below, found = seconds, one
        return found

    def _made(self, starts: Sequence[int], bounds: Sequence[int]) -> Stages | None:
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
        longest, (memory, gradients) = self._longest(times), sizes[fullest]
        return Stages(tuple(starts), frozenset(again), sum(times), longest, memory, fullest, self.virtual, gradients)

    def _fitted(self, rank: int, spans: Sequence[range]) -> tuple[tuple[int, int], set[int]] | None:
        """Bytes of a rank with these stages, of these gradients, and the parts that are computed again: those that
        save most for their time at the fullest moment. None if it does not fit."""
        static = sum(self._static[span.stop] - self._static[span.start] for span in spans)
        loads = [self._load(span.start, span.stop) for span in spans]
        among = moments(self.count, self.virtual, self.microbatches, rank)
        left = [Counter(self.parts[at].again for at in span) if self.again else Counter() for span in spans]
        chosen: list[Counter[Kind]] = [Counter() for _ in spans]

        def choose(stage: int, kind: Kind, number: int) -> None:
            left[stage][kind] -= number
            chosen[stage][kind] += number
            loads[stage] = loads[stage]._replace(kept=loads[stage].kept - number * kind[1])

        if self.again == "all":
            for stage, kinds in enumerate(left):
                for kind, number in list(kinds.items()):
                    choose(stage, kind, number)
        while True:
            size, gradients, moment = max(held_at(loads, among))
            over = static + size - self.limit
            if over <= 0:
                return (static + size, gradients), set(self._first(spans, chosen))
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

    def _times(self, starts: Sequence[int]) -> list[float]:
        """Seconds of each stage for a microbatch, with nothing computed again."""
        return [self._time[stop] - self._time[start] for start, stop in pairwise([*starts, len(self.parts)])]

    def _longest(self, times: Sequence[float]) -> float:
        """Sums the longest stage of each lap."""
        return sum(max(times[lap : lap + self.count]) for lap in range(0, len(times), self.count))

    def _seconds(self, times: Sequence[float]) -> float:
        longest = self._longest(times)
        return sum(times) / self.virtual + (self.microbatches - 1 / self.virtual) * longest

    def _by_time(self) -> tuple[int, ...]:
        """Each stage begins at the boundary of parts that is nearest to its share of the time."""
        stages, size = self.stages, len(self.parts)
        starts, at = [0], 0
        for stage in range(1, stages):
            wanted = self._time[-1] * stage / stages
            at += 1
            while at < size - (stages - stage) and self._time[at + 1] - wanted < wanted - self._time[at]:
                at += 1
            starts.append(at)
        return tuple(starts)
