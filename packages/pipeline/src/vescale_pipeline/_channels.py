"""Whether a schedule's transfers can all be completed, under three models of a transport; pure.

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

MODELS = ("buffered", "pair", "rank")
"""From the one that allows most to the one that allows least."""

Node = tuple[str, int]
"""A waiting rank, ("rank", rank), or an incomplete transfer, ("transfer", number)."""


@dataclass(frozen=True)
class Programs:
    """What ranks post and wait for.

    Arguments:
        events: per rank, in order, 2t where it posts its end of transfer t, and
            2t + 1 where it waits for transfer t.
        ends: per transfer, its two ranks.
    """

    events: list[list[int]]
    ends: list[tuple[int, int]]

    def runs_in_step(self) -> bool:
        """Whether it completes even if every rank did nothing but its next transfer: then so under every model.

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
        """None if everything completes under the model; otherwise who waits for whom where it stops, in a circle."""
        return _Run(self, model).cycle()


class _Run:
    """Everything that can happen has happened."""

    def __init__(self, programs: Programs, model: str) -> None:
        self.programs = programs
        self.model = model
        self.places = [0] * len(programs.events)
        # Transfers posted by a rank and not completed, per lane: a lane completes in order.
        self.lanes: dict[Hashable, deque[int]] = {}
        self.posted = [0] * len(programs.ends)
        self.done = bytearray(len(programs.ends))
        ready = list(range(len(self.places)))
        while ready:
            self._advance(ready.pop(), ready)

    def _lane(self, rank: int, transfer: int) -> deque[int]:
        first, second = self.programs.ends[transfer]
        key = {"buffered": (rank, ~transfer), "pair": (rank, first + second - rank), "rank": rank}[self.model]
        return self.lanes.setdefault(key, deque())

    def _advance(self, rank: int, ready: list[int]) -> None:
        events = self.programs.events[rank]
        while self.places[rank] < len(events):
            event = events[self.places[rank]]
            transfer = event >> 1
            if event & 1:
                if not self.done[transfer]:
                    return
            else:
                self.posted[transfer] += 1
                self._lane(rank, transfer).append(transfer)
                self._complete(transfer, ready)
            self.places[rank] += 1

    def _complete(self, transfer: int, ready: list[int]) -> None:
        """Completes a transfer if it is first in both its lanes, and then those that it held up."""
        behind = [transfer]
        while behind:
            transfer = behind.pop()
            lanes = [self._lane(rank, transfer) for rank in self.programs.ends[transfer]]
            if self.done[transfer] or self.posted[transfer] < 2 or any(lane[0] != transfer for lane in lanes):
                continue
            self.done[transfer] = 1
            ready += self.programs.ends[transfer]
            for lane in lanes:
                lane.popleft()
                behind += [lane[0]] if lane else []

    def cycle(self) -> list[Node] | None:
        events = self.programs.events
        blocked = [("rank", rank) for rank, place in enumerate(self.places) if place < len(events[rank])]
        heads = [("transfer", lane[0]) for lane in self.lanes.values() if lane]
        cycles = [cycle for node in (*blocked, *heads) if (cycle := self._cycle_through(node))]
        return min(cycles, key=len, default=None)

    def _waits_for(self, node: Node) -> list[Node]:
        kind, number = node
        if kind == "rank":
            return [("transfer", self.programs.events[number][self.places[number]] >> 1)]
        waits: list[Node] = []
        for rank in self.programs.ends[number]:
            lane = self._lane(rank, number)
            if number not in lane:
                waits.append(("rank", rank))
            elif lane[0] != number:
                waits.append(("transfer", lane[0]))
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
