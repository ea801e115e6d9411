"""Backwards that come to a block otherwise than through what its call returned.

A block's parameters are gathered when a gradient reaches an output of it. A loss may also be computed from what a
forward left elsewhere: on `self`, in a list of a hook, in an object that nobody looks into (a distribution, a closure).
Then nodes of the block's graph run before, or without, any gradient of an output, and would compute with parameters
at rest.

Nodes are numbered in the order of their making, so those of a call lie between two numbers. Before a backward the
graph is walked from where it starts, and an edge that enters a call at a node that made none of its outputs is a stray:
that node's own hook gathers. The walk ends where it enters a call, so that it costs a few nodes. Calls that have made
another number of nodes than any before are walked through once, for what blocks hand each other past their outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch.autograd.graph import Node

from vescale_dtensor.engine import before_backward

from .._torch_private import _current_graph_task_id
from .units import FSDPUnit, Pass

KEPT = 1024
"""Calls that may still have a backward."""


class Call:
    """A call of a block that made a graph. `began`, `ended`: the numbers between which its nodes are; `outputs`: those
    of the nodes that made what it returned."""

    __slots__ = ("unit", "entry", "began", "ended", "outputs")

    def __init__(self, unit: FSDPUnit, entry: Pass, ended: int, outputs: Iterable[int]) -> None:
        self.unit, self.entry, self.ended, self.outputs = unit, entry, ended, frozenset(outputs)
        self.began = ended if entry.began is None else entry.began


class Strays:
    """The calls of a model's blocks, and the backwards that enter them past their outputs.

    Arguments:
        reached: what happens when a gradient reaches a call's output.
    """

    def __init__(self, reached: Callable[[FSDPUnit, Pass], None]) -> None:
        self._reached = reached
        self._calls: deque[Call] = deque(maxlen=KEPT)
        self._walked: set[tuple[str, int]] = set()  # kinds of calls within which nothing strays
        before_backward(self.look)

    def note(self, call: Call) -> None:
        self._calls.append(call)

    def forget(self) -> None:
        """Forgets the earlier graphs: they are of no use once parameters have changed."""
        self._calls.clear()

    def look(self, nodes: Sequence[Node]) -> None:
        """Before a backward from these nodes, or as it comes to one of them."""
        if not self._calls:
            return
        running = set(nodes) if _current_graph_task_id() != -1 else set()
        strays: dict[Node, dict[Call, None]] = {}
        walked: set[tuple[str, int]] = set()
        is_handed_on = False  # whether something strays within calls, or between them
        # A node, the calls that it is reached from, and whether the way led through any.
        edges: list[tuple[Node, tuple[Call, ...], bool]] = [(node, (), False) for node in nodes]
        seen: set[Node] = set()
        while edges:
            node, before, is_within = edges.pop()
            number = node._sequence_nr()
            around = tuple(call for call in self._calls if call.began <= number < call.ended)
            entered = [call for call in around if call not in before and number not in call.outputs]
            if entered:
                strays.setdefault(node, {}).update(dict.fromkeys(entered))
                is_handed_on |= is_within
            if node in seen:
                continue
            seen.add(node)
            if around:
                outer = min(around, key=lambda call: call.began)
                kind = outer.unit.name, outer.ended - outer.began  # calls of one kind make graphs alike
                if kind in self._walked:
                    continue
                walked.add(kind)
            is_within = is_within or bool(around)
            edges += [(next_, around, is_within) for next_, _ in node.next_functions if next_ is not None]
        if not is_handed_on:
            self._walked |= walked
        for node, calls in strays.items():
            if node in running:
                self._enter(calls, ())
            else:
                node.register_prehook(partial(self._enter, calls))

    def _enter(self, calls: Iterable[Call], gradients: Any) -> None:
        for call in calls:
            self._reached(call.unit, call.entry)
