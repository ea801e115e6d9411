"""A stage's backward: whole, or split into the gradient of its input (I) and those of its weights (W).

Gradients are taken with `autograd.grad`, and hooks are laid aside meanwhile, so that
the parameters' own `.grad` and hooks stay untouched until the user calls
`loss.backward()`.

The split needs no second pass through the graph. In I, autograd computes input
gradients only, and at every node where a weight's branch leaves the way to the input
(the addmm of a linear layer) the gradient that flows into the node is kept. In W each
such node is run once more by itself, for its weights alone. A weight that is used by
two nodes of the stage is computed in I: apart, its uses would be counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.autograd.graph import GradientEdge, Node

from .._torch_private import DisableTorchFunctionSubclass as local_only
from .._torch_private import run_backward as _run

Gradients = list[Tensor | None]


def gradients_of(roots: Sequence, inputs: Sequence, seeds: Sequence, retain_graph: bool = False) -> tuple:
    """`autograd.grad` with allow_unused, without its checks of the seeds, which cost more than a small backward."""
    inputs = tuple(inputs)
    return _run(tuple(roots), tuple(seeds), retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=False)


@contextmanager
def hooks_aside(weights: Iterable[Tensor]) -> Iterator[None]:
    """Users' hooks on the gradients of `weights` do not run: `autograd.grad` calls them too, for every microbatch, and
    they are for the batch's gradient, which the user's backward hands out."""
    laid = []
    with local_only():
        for weight in weights:
            if hooks := weight._backward_hooks:
                laid.append((hooks, dict(hooks)))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in laid:
            added = dict(hooks)
            hooks.clear()
            hooks.update(kept | added)


def both(
    roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Gradients, Gradients]:
    """Gradients of the leaves, and of the weights; None if nothing flows."""
    inputs = (*leaves, *weights)
    if not roots or not inputs:
        return [None] * len(leaves), [None] * len(weights)
    found = gradients_of(roots, inputs, seeds)
    return list(found[: len(leaves)]), list(found[len(leaves) :])


class Split:
    """I when it is made; W when `weights()` is called."""

    def __init__(
        self, roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> None:
        self._weights = weights
        self._early: dict[int, Tensor | None] = {}
        self._late: list[tuple[Sequence, Sequence, list[int]]] = []  # outputs, their gradients, the weights behind them
        self._owners: Sequence[Node] = ()
        self.leaves: Gradients = [None] * len(leaves)
        if not roots:
            return
        nodes, aside, shared = _branches(roots, leaves, weights)
        along, flowing_in = roots, seeds
        if aside:
            at_leaf = [i for i, root in enumerate(roots) if root.grad_fn in aside]
            behind = sorted({w for i in at_leaf for w in aside[roots[i].grad_fn]} - shared)
            self._late.append(([roots[i] for i in at_leaf], [seeds[i] for i in at_leaf], behind))
            if not shared:
                rest = [i for i in range(len(roots)) if i not in at_leaf]
                along, flowing_in = [roots[i] for i in rest], [seeds[i] for i in rest]
        kept = [GradientEdge(node, i) for node in nodes for i in range(len(node._input_metadata))]
        early = sorted(shared)
        inputs = (*leaves, *kept, *(weights[i] for i in early))
        if not along or not inputs:
            return
        self._owners = _owners(along, nodes)
        found = gradients_of(along, inputs, flowing_in, retain_graph=True)
        at = len(leaves)
        self.leaves = list(found[:at])
        for node, behind in nodes.items():
            count = len(node._input_metadata)
            arrived = [(kept[i - len(leaves)], found[i]) for i in range(at, at + count) if found[i] is not None]
            at += count
            if shared:
                behind = [i for i in behind if i not in shared]
            if behind and arrived:
                self._late.append((*zip(*arrived), behind))
        self._early = dict(zip(early, found[at:]))

    def weights(self) -> Gradients:
        """The gradients of the weights; call it once."""
        found: Gradients = [None] * len(self._weights)
        for index, gradient in self._early.items():
            found[index] = gradient
        late, self._late = self._late, []
        for outputs, gradients, behind in late:
            for index, gradient in zip(behind, gradients_of(outputs, [self._weights[i] for i in behind], gradients)):
                found[index] = gradient
        self._owners = ()
        return found


def _owners(roots: Sequence[Tensor], nodes: Iterable[Node]) -> Sequence[Node]:
    """Nodes that keep `nodes` until W, where these do not keep themselves."""
    if not any(isinstance(node, BackwardCFunction) for node in nodes) or _do_pythons_nodes_keep_themselves():
        return ()
    with torch.enable_grad(), local_only():
        return [root.view_as(root).grad_fn for root in roots]


@cache
def _do_pythons_nodes_keep_themselves() -> bool:
    """Tells whether the node of a Python autograd Function, a user's or a compiled module's, lives as long as it is
    held: in torch 2.11 C++ alone owns it, and it ends with the outputs above it."""
    with torch.enable_grad():
        root = torch.ones(1, requires_grad=True)
        node = _Same.apply(root).grad_fn
    try:
        return gradients_of([GradientEdge(node, 0)], [root], [torch.ones(1)])[0] is not None
    except RuntimeError:
        return False


class _Same(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


_ON_THE_WAY = object()


def _branches(
    roots: Sequence[Tensor], leaves: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[dict[Node, list[int]], dict[Node, tuple[int, ...]], set[int]]:
    """Finds where weights' branches leave the way to the leaves.

    Returns: node on the way -> the weights whose branches leave it; root node that leads
    to no leaf -> the weights behind it; and the weights that several of these lead to.
    """
    ends: dict[int, Any] = {id(weight): (i,) for i, weight in enumerate(weights)}
    ends |= {id(leaf): _ON_THE_WAY for leaf in leaves}
    leads: dict[Node, Any] = {}  # _ON_THE_WAY to a leaf, or the weights behind
    nodes: dict[Node, list[int]] = {}
    aside: dict[Node, tuple[int, ...]] = {}
    uses = [0] * len(weights)
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    while stack:
        node = stack[-1]
        if node in leads:
            stack.pop()
            continue
        following = node.next_functions
        deeper = len(stack)
        for child, _ in following:
            if child is not None and child not in leads:
                if child.next_functions:
                    stack.append(child)
                else:
                    leads[child] = ends.get(id(getattr(child, "variable", None)), ())
        if len(stack) > deeper:
            continue
        stack.pop()
        on_the_way, behind = False, ()
        for child, _ in following:
            if child is not None:
                found = leads[child]
                if found is _ON_THE_WAY:
                    on_the_way = True
                else:
                    behind += found
        if not following:
            leads[node] = ends.get(id(getattr(node, "variable", None)), ())
        elif not on_the_way:
            leads[node] = behind if len(behind) < 2 else tuple(set(behind))
        else:
            leads[node] = _ON_THE_WAY
            if behind:
                nodes[node] = sorted(set(behind))
                for i in nodes[node]:
                    uses[i] += 1
    for root in roots:
        if root.grad_fn is not None and leads[root.grad_fn] is not _ON_THE_WAY:
            aside[root.grad_fn] = leads[root.grad_fn]
    beside = set().union(*aside.values())
    return nodes, aside, {i for i, count in enumerate(uses) if count + (i in beside) > 1}
