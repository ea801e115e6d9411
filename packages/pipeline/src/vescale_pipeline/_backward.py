"""A stage's backward: whole, or split into the gradient of its input (I) and those of its weights (W).

Gradients are taken with `autograd.grad`, so that the parameters' own `.grad` and
hooks stay untouched until the user calls `loss.backward()`.

The split needs no second pass through the graph. In I, autograd computes input
gradients only, and at every node where a weight's branch leaves the way to the input
(the addmm of a linear layer) the gradient that flows into the node is kept. In W each
such node is run once more by itself, for its weights alone. A weight that is used by
two nodes of the stage is computed in I: apart, its uses would be counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = list[Tensor | None]
_run = torch.autograd.Variable._execution_engine.run_backward


def gradients_of(roots: Sequence, inputs: Sequence, seeds: Sequence, retain_graph: bool = False) -> tuple:
    """`autograd.grad` with allow_unused, without its checks of the seeds, which cost more than a small backward."""
    inputs = tuple(inputs)
    return _run(tuple(roots), tuple(seeds), retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=False)


def whole(
    roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor], weights: Sequence[GradientEdge]
) -> tuple[Gradients, Gradients]:
    """Gradients of the leaves, and of the weights; None where nothing flows."""
    inputs = [*leaves, *weights]
    if not roots or not inputs:
        return [None] * len(leaves), [None] * len(weights)
    found = gradients_of(roots, inputs, seeds)
    return list(found[: len(leaves)]), list(found[len(leaves) :])


class Split:
    """I when it is made; W when `weights()` is called."""

    def __init__(
        self,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor],
        leaves: Sequence[Tensor],
        weights: Sequence[GradientEdge],
    ) -> None:
        self._count = len(weights)
        self._early: dict[int, Tensor | None] = {}
        self._late: list[tuple[list, list, list[int]]] = []  # outputs, their gradients, the weights behind them
        self._edges = weights
        self.leaves: Gradients = [None] * len(leaves)
        if not roots:
            return
        branches, shared = _branches(roots, leaves, weights)
        at_leaf = [(root, seed) for root, seed in zip(roots, seeds) if root.grad_fn in branches.aside]
        along = [(root, seed) for root, seed in zip(roots, seeds) if root.grad_fn not in branches.aside]
        if at_leaf:
            behind = sorted({w for root, _ in at_leaf for w in branches.aside[root.grad_fn]} - set(shared))
            self._late.append(([root for root, _ in at_leaf], [seed for _, seed in at_leaf], behind))
        kept = [GradientEdge(node, i) for node in branches.nodes for i in range(len(node._input_metadata))]
        inputs = [*leaves, *kept, *(weights[i] for i in shared)]
        if shared:
            along = list(zip(roots, seeds))
        if not along or not inputs:
            return
        found = gradients_of([root for root, _ in along], inputs, [seed for _, seed in along], retain_graph=True)
        found = list(found)
        self.leaves = found[: len(leaves)]
        flowing = dict(zip([(edge.node, edge.output_nr) for edge in kept], found[len(leaves) :]))
        self._early = dict(zip(shared, found[len(leaves) + len(kept) :]))
        for node, behind in branches.nodes.items():
            behind = [i for i in behind if i not in shared]
            arrived = [
                (GradientEdge(node, i), flowing[node, i])
                for i in range(len(node._input_metadata))
                if flowing[node, i] is not None
            ]
            if behind and arrived:
                self._late.append(([edge for edge, _ in arrived], [g for _, g in arrived], behind))

    def weights(self) -> Gradients:
        """The gradients of the weights; call it once."""
        found: Gradients = [None] * self._count
        for index, gradient in self._early.items():
            found[index] = gradient
        late, self._late = self._late, []
        for outputs, gradients, behind in late:
            inputs = [self._edges[i] for i in behind]
            for index, gradient in zip(behind, gradients_of(outputs, inputs, gradients)):
                found[index] = gradient
        return found


class _Branches:
    """Where weights' branches leave the way to the leaves.

    nodes: node on the way -> the weights whose branches leave it.
    aside: root node that leads to no leaf -> the weights behind it.
    """

    def __init__(self) -> None:
        self.nodes: dict[Node, list[int]] = {}
        self.aside: dict[Node, set[int]] = {}


def _branches(
    roots: Sequence[Tensor], leaves: Sequence[Tensor], weights: Sequence[GradientEdge]
) -> tuple[_Branches, list[int]]:
    """The branches, and the weights that several of them lead to."""
    leaf_nodes = {get_gradient_edge(leaf).node for leaf in leaves}
    weight_at = {edge.node: i for i, edge in enumerate(weights)}
    leads: dict[Node, bool] = {}
    behind: dict[Node, set[int]] = {}  # of nodes that lead to no leaf
    found = _Branches()
    uses = [0] * len(weights)
    nothing: set[int] = set()
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    while stack:
        node = stack[-1]
        if node in leads:
            stack.pop()
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        waiting = [child for child in children if child not in leads]
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        leads[node] = node in leaf_nodes or any(leads[child] for child in children)
        if not leads[node]:
            own = weight_at.get(node)
            if own is not None:
                behind[node] = {own}
            elif children:
                behind[node] = set().union(*(behind[child] for child in children))
            else:
                behind[node] = nothing
            continue
        leaving = {i for child in children if not leads[child] for i in behind[child]}
        if leaving:
            found.nodes[node] = sorted(leaving)
            for i in leaving:
                uses[i] += 1
    for root in roots:
        if root.grad_fn is not None and not leads[root.grad_fn] and root.grad_fn not in found.aside:
            found.aside[root.grad_fn] = behind[root.grad_fn]
    aside = set().union(*found.aside.values()) if found.aside else nothing
    shared = [i for i, count in enumerate(uses) if count + (i in aside) > 1]
    return found, shared
