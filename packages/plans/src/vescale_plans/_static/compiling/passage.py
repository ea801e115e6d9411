"""What autograd finds at a graph of a compiler: the gradients that the code itself would have.

A compiler gives a zero where nothing used the output that a parameter or an input reaches, and the code's own graph
gives nothing: by a zero an optimizer steps, and decays the weight. A gradient's own gradient no graph has: torch says
so where it notices, and some were zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import local_only

from ..._apply.containers import map_tensors
from ..._plan.parts import PlanError
from ..frame import Frame, tensors_of

Reach = Sequence[frozenset[int]]
"""Of each output with a gradient, in order, the places of what it was computed from."""


def reach_of(frame: Frame) -> Reach | None:
    """The places among the module's parameters and buffers (`held_in`), and behind them among the frame's inputs, that
    the backward of each output comes to; None for one output, or none. Call it while the call's graph is there."""
    held = [table[name] for table, name in held_in(frame.module)]
    with local_only():
        outputs = [tensor for tensor in tensors_of(frame.out) if tensor.requires_grad]
        if len(outputs) < 2:
            return None
        ends: dict[Any, int] = {}
        for place, tensor in enumerate((*held, *frame.inputs)):
            if tensor.requires_grad:
                ends.setdefault(id(tensor) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr), place)
        return [_places_behind(tensor, ends) for tensor in outputs]


def _places_behind(output: Tensor, ends: dict[Any, int]) -> frozenset[int]:
    found, seen = set(), set()
    waiting: list[tuple[Any, int]] = [(output.grad_fn, output.output_nr)]
    while waiting:
        at = node, _ = waiting.pop()
        if at in ends:
            found.add(ends[at])
        elif node is not None and node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) in ends:
                found.add(ends[id(leaf)])
            waiting += node.next_functions
    return frozenset(found)


def held_in(module: nn.Module) -> list[tuple[dict, str]]:
    """The places of a module's distributed parameters and buffers, and of those below it: tables, and names there."""
    tables = [table for one in module.modules() for table in (one._parameters, one._buffers)]
    return [(table, name) for table in tables for name, held in table.items() if type(held) is DTensor]


class Passage:
    """One call of a graph: what enters it and what leaves it, under other objects, which are views of nothing."""

    def __init__(self, name: str, reach: Reach | None) -> None:
        self._name, self._reach = name, reach
        self._places: list[set[int]] = []  # of each object that entered
        self._used: list[int] = []  # outputs that the backward that runs comes from

    def enter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of each, another object for its memory, with its gradient: one node of autograd's for all of them. What a
        graph keeps for its backward must still be plain then, and a compiler also asks what a tensor is a view of."""
        places: dict[int, set[int]] = {}
        for place, tensor in enumerate(tensors):
            places.setdefault(id(tensor), set()).add(place)
        self._places = list(places.values())
        made = dict(zip(places, _Enter.apply(self, *{id(tensor): tensor for tensor in tensors}.values())))
        return [made[id(tensor)] for tensor in tensors]

    def leave(self, out: Any) -> Any:
        """The graph's result. Of tensors without gradient autograd keeps those that it was given as they are."""
        if self._reach is not None:
            trained = {id(tensor): tensor for tensor in tensors_of(out) if tensor.requires_grad}
            if len(trained) == len(self._reach):
                left = dict(zip(trained, _Leave.apply(self, *trained.values())))
                return map_tensors(out, lambda tensor: left.get(id(tensor), tensor.detach()))
            self._reach = None
        return apart(out)

    def comes_from(self, gradients: Sequence[Tensor | None]) -> None:
        """A backward has come to the outputs, of which some have a gradient."""
        self._used = [i for i, gradient in enumerate(gradients) if gradient is not None]

    def passed(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients of what entered, without those of what no output that is in use reaches."""
        if self._reach is None:
            return gradients
        reached = frozenset().union(*(self._reach[i] for i in self._used))
        return [one if places & reached else None for one, places in zip(gradients, self._places)]

    def check_order(self) -> None:
        """Raises PlanError where a backward makes a graph of its own, which a compiler's does not."""
        if torch.is_grad_enabled():
            rule = f"{self._name} is compiled, and the gradient of a compiled graph has no gradient (create_graph=True)"
            raise PlanError("backward", rule, (), [('mode="static"', "not compiled: plain local tensors, eagerly")])


def apart(value: Any) -> Any:
    """`value` with tensors that need no gradient as other objects."""
    return map_tensors(value, lambda tensor: tensor if tensor.requires_grad else tensor.detach())


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        made = tuple([tensor.detach() for tensor in tensors])
        ctx.mark_non_differentiable(*(one for one, tensor in zip(made, tensors) if not tensor.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.passage.check_order()
        return None, *ctx.passage.passed(gradients)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.passage.comes_from(gradients)
        return None, *gradients
