"""A capacity per expert: of the rows that choose it, in the order of tokens and then of choices, the first so many.

    capacity = ceil(factor * tokens * chosen / experts), tokens of the whole batch

The order is the global one, so that every mesh drops what one device drops. A row that is dropped adds nothing to its
token; the weights of the others stay. The factor is GShard's (arXiv 2006.16668, 2.2), counted over all groups.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from vescale_dtensor import Layout
from vescale_dtensor.debug import Cause
from vescale_dtensor.engine import GatherInFlight, set_cause


def capacities(indices: Tensor, layout: Layout, experts: int, factor: float, name: str) -> Tensor:
    """Returns how many of this rank's rows every expert takes, int64 [experts].

    Arguments:
        indices: this rank's experts [t, k] of the global ones that `layout` describes.

    Cost: an all-gather of 8 bytes per expert over the axes that shard tokens.
    """
    capacity = max(1, ceil(factor * layout.numel / experts))
    axes = tuple(axis for axis, state in enumerate(layout.states) if state.is_sharded and layout.mesh.sizes[axis] > 1)
    counts = counted(indices.reshape(-1), experts)
    if not axes:
        return torch.full_like(counts, capacity)
    set_cause(Cause("expert capacity", name))
    mesh, everyone = layout.mesh, counts.new_empty(layout.mesh.count(axes) * experts)
    GatherInFlight(everyone, counts, mesh, axes).wait()
    place = 0
    for axis in axes:
        place = place * mesh.sizes[axis] + mesh.coordinate[axis]
    earlier = everyone.view(-1, experts)[:place].sum(0)
    return (capacity - earlier).clamp(min=0)


def counted(chosen: Tensor, experts: int) -> Tensor:
    """Returns how many rows chose every expert. (`bincount` makes the host wait for the largest index.)"""
    return chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def positions(sorted_experts: Tensor) -> Tensor:
    """Returns, for each row of rows sorted by expert, how many of its expert's come before it."""
    if not len(sorted_experts):
        return sorted_experts
    first = torch.searchsorted(sorted_experts, sorted_experts)
    return torch.arange(len(sorted_experts), device=sorted_experts.device) - first
