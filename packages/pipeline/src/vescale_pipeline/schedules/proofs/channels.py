"""Proves whether a schedule's transfers can all be completed, under three models of a transport; pure.

Sends and receives are posted in program order; a compute action waits for what it
consumes. What the models differ in is which posted transfers may complete:

    buffered  any, once both its ends are posted (tagged messages; gloo)
    pair      of those between two ranks, in both directions, only the one that each
              of the two posted first (one stream per pair of ranks; NCCL unbatched)
    rank      of all those of a rank, only the one that it posted first (one stream
              per rank)

Each model allows less than the one before. The order of completions does not
matter: completing a transfer never prevents another. So a run that completes what it
can until nothing is left decides, and where it stops, everything left waits in a
circle, of which the shortest is the counterexample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

MODELS = ("buffered", "pair", "rank")
"""Models of a transport, from the one that allows most to the one that allows least."""

Node = tuple[str, int]
"""A waiting rank, ("rank", rank), or an incomplete transfer, ("transfer", number)."""


@dataclass(frozen=True)
class Programs:
    """Posts and waits of the ranks.

    Arguments:
        events: per rank, in order, 2t where it posts its end of transfer t, and
            2t + 1 where it waits for transfer t.
        ends: per transfer, its two ranks.
    """

    events: list[list[int]]
    ends: list[tuple[int, int]]

    def runs_in_step(self) -> bool:
        """True if it completes even if every rank did nothing but its next transfer: then so under every model.

        The usual case, told in one cheap pass.
        """
        posts = [[event >> 1 for event in events if not event & 1] + [-1] for events in self.events]
        heads = [0] * len(posts)
        ready = list(range(len(posts)))
        while ready:
            rank = ready.pop()
            mine, head = posts[rank], heads[rank]
            while (transfer := mine[head]) >= 0:
                first, second = self.ends[transfer]
                other = second if first == rank else first
                if posts[other][heads[other]] != transfer:
                    break
                head += 1
                heads[other] += 1
                ready.append(other)
            heads[rank] = head
        return all(of_rank[head] < 0 for of_rank, head in zip(posts, heads))

    def shortest_cycle(self, model: str) -> list[Node] | None:
        """Returns None if everything completes under the model; otherwise who waits for whom where it stops, in a
        circle."""
        return _Run(self, model).cycle()


class _Run:
    """Everything that can happen has happened.

    A lane is what a model lets complete in order only: the posts of a rank, or those
    to one peer. Under "buffered" there are none.
    """

    def __init__(self, programs: Programs, model: str) -> None:
        self.programs = programs
        self.places = [0] * len(programs.events)
        self.posted = bytearray(len(programs.ends))
        self.done = bytearray(len(programs.ends))
        self.by_peer = model == "pair"
        self.lanes: dict[Hashable, list[int]] = {}
        if model != "buffered":
            for rank, events in enumerate(programs.events):
                for event in events:
                    if not event & 1:
                        self.lanes.setdefault(self._lane(rank, event >> 1), []).append(event >> 1)
        self.heads = dict.fromkeys(self.lanes, 0)
        self._run()

    def _lane(self, rank: int, transfer: int) -> Hashable:
        first, second = self.programs.ends[transfer]
        return (rank, first + second - rank) if self.by_peer else rank

    def _run(self) -> None:
        waiting: dict[int, int] = {}
        ready = list(range(len(self.places)))
        posted, done, complete = self.posted, self.done, self._complete if self.lanes else self._complete_at_once
        while ready:
            rank = ready.pop()
            events, place = self.programs.events[rank], self.places[rank]
            while place < len(events):
                event = events[place]
                transfer = event >> 1
                if event & 1:
                    if not done[transfer]:
                        waiting[transfer] = rank
                        break
                else:
                    posted[transfer] += 1
                    if posted[transfer] == 2:
                        ready += [waiting.pop(each) for each in complete(transfer) if each in waiting]
                place += 1
            self.places[rank] = place

    def _complete_at_once(self, transfer: int) -> tuple[int]:
        self.done[transfer] = 1
        return (transfer,)

    def _complete(self, transfer: int) -> list[int]:
        """Completes a transfer if it is first in both its lanes, and then those that it held up."""
        completed, behind = [], [transfer]
        while behind:
            transfer = behind.pop()
            keys = [self._lane(rank, transfer) for rank in self.programs.ends[transfer]]
            if self.posted[transfer] < 2 or any(self._head(key) != transfer for key in keys):
                continue
            self.done[transfer] = 1
            completed.append(transfer)
            for key in keys:
                self.heads[key] += 1
                if (head := self._head(key)) is not None:
                    behind.append(head)
        return completed

    def _head(self, key: Hashable) -> int | None:
        lane, head = self.lanes[key], self.heads[key]
        return lane[head] if head < len(lane) else None

    def cycle(self) -> list[Node] | None:
        events = self.programs.events
        blocked = [("rank", rank) for rank, place in enumerate(self.places) if place < len(events[rank])]
        heads = [("transfer", head) for key in self.lanes if (head := self._head(key)) is not None]
        cycles = [cycle for node in (*blocked, *heads) if (cycle := self._cycle_through(node))]
        return min(cycles, key=len, default=None)

    @cached_property
    def _posted_by(self) -> list[set[int]]:
        programs = zip(self.programs.events, self.places)
        return [{event >> 1 for event in events[:place] if not event & 1} for events, place in programs]

    def _waits_for(self, node: Node) -> list[Node]:
        kind, number = node
        if kind == "rank":
            return [("transfer", self.programs.events[number][self.places[number]] >> 1)]
        waits: list[Node] = []
        for rank in self.programs.ends[number]:
            if number not in self._posted_by[rank]:
                waits.append(("rank", rank))
            elif self.lanes and (head := self._head(self._lane(rank, number))) != number:
                waits.append(("transfer", head))
        return waits

    def _cycle_through(self, node: Node) -> list[Node] | None:
        """The shortest way from a node back to itself."""
        before: Mapping[Node, Node | None] = {node: None}
        queue = deque([node])
        while queue:
            here = queue.popleft()
            for there in self._waits_for(here):
                if there == node:
                    path = [here]
                    while (earlier := before[path[-1]]) is not None:
                        path.append(earlier)
                    return path[::-1]
                if there not in before:
                    before[there] = here
                    queue.append(there)
        return None
