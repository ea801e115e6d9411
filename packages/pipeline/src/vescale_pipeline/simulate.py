"""simulate: what a schedule takes, in time and memory, for given costs of its actions; pure.

Each rank computes one action at a time, in order, and waits for what an action
consumes. Transfers run beside computation: one begins when its send and its
receive are posted and the transfer before it between these two ranks, in this
direction, is done.

Two bubbles are stated, because published figures use both. `bubble` is the idle
share of all ranks from the first start to the last end, as when ranks meet at a
barrier, which any global sum in a step is (a clipped norm, a loss). The authors
of the zero-bubble schedules (Qi et al., arXiv 2401.10241) count, per rank, from its
own first start to its own last end: `window_bubble`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ._errors import ScheduleError
from .action import COMPUTE, Action, Schedule

PerStage = float | Sequence[float]
"""One number for all stages, or one per stage."""


@dataclass(frozen=True)
class Costs:
    """The costs of a stage's actions, in any unit of time and of memory.

    Arguments:
        forward, input_gradient, weight_gradient: times of F, I and W; B takes the latter two together.
        transfer: time of one send, between any two ranks.
        activation: memory that F keeps until the end of B or I. By default, that of one microbatch through all stages
            of a rank is 1.
        residue: the part of it that I keeps until the end of W; by default all of it.
    """

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    transfer: float = 0.0
    activation: PerStage | None = None
    residue: PerStage | None = None

    def times(self, schedule: Schedule) -> dict[str, list[float]]:
        """Kind of compute action -> its time on each stage."""
        forward = _per_stage("forward", self.forward, schedule)
        inputs = _per_stage("input_gradient", self.input_gradient, schedule)
        weights = _per_stage("weight_gradient", self.weight_gradient, schedule)
        return {"F": forward, "I": inputs, "W": weights, "B": [i + w for i, w in zip(inputs, weights)]}

    def memory(self, schedule: Schedule) -> tuple[list[float], list[float]]:
        """Memory of one microbatch on each stage: the activation, and its residue."""
        if self.activation is None:
            per_rank = [max(1, len(schedule.stages_of(rank))) for rank in range(schedule.ranks)]
            activation = [1 / per_rank[rank] for rank in schedule.placement]
        else:
            activation = _per_stage("activation", self.activation, schedule)
        return activation, activation if self.residue is None else _per_stage("residue", self.residue, schedule)


UNIT_COSTS = Costs()
"""F, I and W take one unit each and transfers nothing, as the published analyses have it."""


class Event(NamedTuple):
    """An action with its times; for a transfer, from when it was in flight until it arrived."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule with times.

    Arguments:
        schedule: what was simulated.
        events: compute actions and receives, by start.
        critical_path: the events, first to last, of which each waited for the one
            before and which together last as long as the whole.
        peak_memory: per rank, as of `peak_memory`.
    """

    schedule: Schedule
    events: tuple[Event, ...]
    critical_path: tuple[Event, ...]
    peak_memory: tuple[float, ...]

    @cached_property
    def makespan(self) -> float:
        """Time from the start to the end of the last action."""
        return max((event.end for event in self.events), default=0.0)

    def makespan_at(self, pace: Callable[[int], float]) -> float:
        """`makespan` where all ranks take `pace(n)` times as long while n of them compute, as on cores that they
        share."""
        changes = [(event.start, 1) for events in self._computed for event in events]
        changes += [(event.end, -1) for events in self._computed for event in events]
        total = before = 0.0
        computing = 0
        for at, change in sorted(changes):
            total += (at - before) * (pace(computing) if computing else 1.0)
            computing, before = computing + change, at
        return total + self.makespan - before

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Per rank, the time that it computes."""
        return tuple(sum(event.end - event.start for event in events) for events in self._computed)

    @cached_property
    def bubble(self) -> float:
        """The idle share of all ranks' time up to the makespan."""
        return 1 - sum(self.work) / (self.schedule.ranks * self.makespan) if self.makespan else 0.0

    @cached_property
    def window_bubble(self) -> float:
        """The idle share of the longest time that any rank takes from its first start to its last end."""
        spans = [events[-1].end - events[0].start if events else 0.0 for events in self._computed]
        return 1 - sum(self.work) / (len(spans) * max(spans)) if any(spans) else 0.0

    @cached_property
    def _computed(self) -> list[list[Event]]:
        ranks: list[list[Event]] = [[] for _ in range(self.schedule.ranks)]
        for event in self.events:
            if event.action.kind in COMPUTE:
                ranks[event.rank].append(event)
        return ranks


def simulate(schedule: Schedule, costs: Costs = UNIT_COSTS) -> Simulation:
    """Computes the times of every action of a schedule that `verify` accepts.

    Raises ScheduleError if the schedule waits for itself, or if the number of costs per stage is not the number of
    stages.
    """
    clock = _Clock(schedule, costs)
    clock.run()
    events = tuple(sorted(clock.events, key=lambda event: (event.start, event.end, event.rank)))
    return Simulation(schedule, events, clock.critical_path(), peak_memory(schedule, costs))


def peak_memory(schedule: Schedule, costs: Costs = UNIT_COSTS) -> tuple[float, ...]:
    """Returns, per rank, the most activation memory alive at once, in the unit of `costs`.

    It follows from the order alone: F keeps a stage's activation, I leaves its residue, and B or W leave nothing.
    """
    activation, residue = costs.memory(schedule)
    change = {
        "F": activation,
        "B": [-a for a in activation],
        "I": [r - a for a, r in zip(activation, residue)],
        "W": [-r for r in residue],
    }
    peaks = []
    for actions in schedule.actions:
        alive = peak = 0.0
        for kind, stage, _, _ in actions:
            if kind in change:
                alive += change[kind][stage]
                peak = max(peak, alive)
        peaks.append(peak)
    return tuple(peaks)


class _Clock:
    """Runs every rank as far as it can, again and again, until all are at their end."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.times = costs.times(schedule)
        self.transfer = costs.transfer
        self.events: list[Event] = []
        # Why each event began when it did: the event whose end it waited for.
        self.causes: dict[int, int | None] = {}
        self.now = [0.0] * schedule.ranks
        self.places = [0] * schedule.ranks
        self.latest: list[int | None] = [None] * schedule.ranks
        # Posted ends of transfers by (kind of tensor, sending stage, microbatch): time and cause.
        self.posted: dict[tuple[str, int, int], tuple[float, int | None]] = {}
        self.channels: dict[tuple[int, int], int] = {}
        # What compute actions consume: (kind, consuming stage, microbatch) -> index of the event that made it.
        self.made: dict[tuple[str, int, int], int] = {}
        self.waiting: dict[tuple[str, int, int], int] = {}

    def run(self) -> None:
        ready = list(range(self.schedule.ranks))
        while ready:
            rank = ready.pop()
            actions = self.schedule.actions[rank]
            while self.places[rank] < len(actions):
                action = actions[self.places[rank]]
                if action.kind in COMPUTE:
                    needs = self._needs(action)
                    if needs is not None and needs not in self.made:
                        self.waiting[needs] = rank
                        break
                    made = self._compute(rank, action, None if needs is None else self.made[needs])
                else:
                    made = self._post(rank, action)
                self.places[rank] += 1
                if made in self.waiting:
                    ready.append(self.waiting.pop(made))
        stuck = [rank for rank, place in enumerate(self.places) if place < len(self.schedule.actions[rank])]
        if stuck:
            lines = [f"rank {rank} waits before {self.schedule.actions[rank][self.places[rank]]}" for rank in stuck]
            raise ScheduleError("simulate", "these ranks wait for something that never arrives", lines)

    def _needs(self, action: Action) -> tuple[str, int, int] | None:
        kind, stage, microbatch, _ = action
        if kind == "F":
            return ("F", stage, microbatch) if stage > 0 else None
        return ("B", stage, microbatch) if kind != "W" and stage + 1 < self.schedule.stages else None

    def _compute(self, rank: int, action: Action, source: int | None) -> tuple[str, int, int] | None:
        kind, stage, microbatch, _ = action
        start, cause = self.now[rank], self.latest[rank]
        if source is not None and self.events[source].end > start:
            start, cause = self.events[source].end, source
        self.now[rank] = start + self.times[kind][stage]
        index = self.latest[rank] = self._record(Event(rank, action, start, self.now[rank]), cause)
        # A neighbour on the same rank takes the tensor as it is.
        neighbour = stage + 1 if kind == "F" else stage - 1
        if kind == "W" or not 0 <= neighbour < self.schedule.stages or self.schedule.placement[neighbour] != rank:
            return None
        self.made[made := ("F" if kind == "F" else "B", neighbour, microbatch)] = index
        return made

    def _post(self, rank: int, action: Action) -> tuple[str, int, int] | None:
        """Posts one end of a transfer; gives what arrives, when this was the later end."""
        kind, stage, microbatch, peer = action
        if peer is None:
            return None
        direction = kind[-1]
        sends = kind.startswith("SEND")
        sender = stage if sends else stage - 1 if direction == "F" else stage + 1
        receiver = sender + 1 if direction == "F" else sender - 1
        key = (direction, sender, microbatch)
        if key not in self.posted:
            self.posted[key] = (self.now[rank], self.latest[rank])
            return None
        start, cause = max(self.posted.pop(key), (self.now[rank], self.latest[rank]), key=lambda end: end[0])
        channel = (rank, peer) if sends else (peer, rank)
        before = self.channels.get(channel)
        if before is not None and self.events[before].end > start:
            start, cause = self.events[before].end, before
        receive = Action(f"RECV_{direction}", receiver, microbatch, channel[0])
        index = self._record(Event(channel[1], receive, start, start + self.transfer), cause)
        self.channels[channel] = index
        self.made[made := (direction, receiver, microbatch)] = index
        return made

    def _record(self, event: Event, cause: int | None) -> int:
        self.events.append(event)
        self.causes[len(self.events) - 1] = cause
        return len(self.events) - 1

    def critical_path(self) -> tuple[Event, ...]:
        """Back from the event that ends last, each time to what it waited for."""
        if not self.events:
            return ()
        index: int | None = max(range(len(self.events)), key=lambda i: self.events[i].end)
        path = []
        while index is not None:
            path.append(self.events[index])
            index = self.causes[index]
        return tuple(reversed(path))


def _per_stage(name: str, value: PerStage, schedule: Schedule) -> list[float]:
    if isinstance(value, (int, float)):
        return [float(value)] * schedule.stages
    if len(value) != schedule.stages:
        raise ScheduleError("Costs", f"{name} has {len(value)} numbers for {schedule.stages} stages")
    return [float(number) for number in value]
