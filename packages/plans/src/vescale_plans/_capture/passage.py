"""The passage of gradients through a compiled graph: they are those that the code itself would have.

A compiler gives a zero to what only unused outputs were computed from, and the code's own graph gives nothing: an
optimizer steps by a zero, and decays the weight. A compiled graph's gradient has no gradient of its own: torch raises
where it notices, and elsewhere some were zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._plan.parts import PlanError

Reach = Sequence[frozenset[int]]
"""Per output of a graph, the places of the inputs that its gradient reaches."""


def reach_of(inputs: Sequence[Any], outputs: Sequence[Any]) -> Reach:
    """Returns which inputs the backward of each output reaches, by the autograd graph of the tensors that a tracer
    computed with."""
    leaves = {id(one): place for place, one in enumerate(inputs) if isinstance(one, Tensor) and one.requires_grad}
    known: dict[Any, frozenset[int]] = {}  # by node of autograd's
    return [_behind(one, leaves, known) if isinstance(one, Tensor) else frozenset() for one in outputs]


def _behind(output: Tensor, leaves: dict[int, int], known: dict[Any, frozenset[int]]) -> frozenset[int]:
    if output.grad_fn is None:
        return frozenset([leaves[id(output)]] if id(output) in leaves else ())
    waiting = [output.grad_fn]
    while waiting:
        node = waiting[-1]
        below = [one for one, _ in node.next_functions if one is not None]
        if new := [one for one in below if one not in known]:
            waiting += new
            continue
        waiting.pop()
        leaf = getattr(node, "variable", None)
        own = [leaves[id(leaf)]] if id(leaf) in leaves else []
        known[node] = frozenset(own).union(*(known[one] for one in below))
    return known[output.grad_fn]


class Passage:
    """One call of a graph: what enters it, and which of its outputs a backward came from."""

    def __init__(self, name: str, reach: Reach) -> None:
        self._name, self._reach = name, reach
        self._used: frozenset[int] | None = None  # inputs that the outputs in use reach; None: not known, all

    def enter(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns plain tensors over the memory of `tensors`, behind one node of autograd's. Call with dispatch
        disabled."""
        return _enter(self, *tensors)

    def left(self, outputs: Sequence[Any]) -> None:
        """Notes the graph's outputs. Where they are of one node of autograd's, that tells which are in use."""
        trained = {i: one for i, one in enumerate(outputs) if isinstance(one, Tensor) and one.requires_grad}
        nodes = {one.grad_fn for one in trained.values()}
        if len(trained) < 2 or len(nodes) > 1 or len({self._reach[i] for i in trained}) < 2:
            return
        at = [(one.output_nr, i) for i, one in trained.items()]

        def begins(gradients: Sequence[Tensor | None]) -> None:
            used = [self._reach[i] for number, i in at if gradients[number] is not None]
            self._used = frozenset().union(*used)

        nodes.pop().register_prehook(begins)

    def passed(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Returns the gradients of what entered, None for what no output in use reaches."""
        if torch.is_grad_enabled():
            rule = f"{self._name} is compiled, and the gradient of a compiled graph has no gradient (create_graph=True)"
            raise PlanError("backward", rule, (), [('parallelize(..., mode="eager")', "gradients of any order")])
        used, self._used = self._used, None
        if used is None:
            return gradients
        return [one if place in used else None for place, one in enumerate(gradients)]


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
        return None, *ctx.passage.passed(gradients)


# What a class's own `apply` does in the end: once a model is parallelized, that decides on layouts.
_enter = super(torch.autograd.Function, _Enter).apply
