"""The members of a list of experts: whose they are, where they lie, and what calls of their block have told of them."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import nn

from vescale_dtensor.engine import Mesh

from .route import Spread
from .rows import Rows
from .split import refuse_unsplit, split_axes


class Members:
    """See the module.

    Arguments:
        block: calls them.
        name: of the list, by the root.
        count: of the experts of all ranks.
        axis: the mesh axis over which they are spread.
    """

    def __init__(self, block: nn.Module, name: str, count: int, mesh: Mesh, axis: str) -> None:
        self.name, self.key = name, name.rpartition(".")[2]
        self.modules: nn.ModuleList = getattr(block, self.key)
        self.mesh, at = mesh, mesh.names.index(axis)
        self.spread = Spread(name, mesh, at, count)
        self.split, whole = split_axes(self.modules.named_parameters(), at)
        refuse_unsplit(name, mesh, self.modules.named_parameters(), whole)
        self.load = [0] * self.spread.local
        self.replicas: tuple[int, ...] = ()
        self.gives: torch.dtype | None = None  # of an expert's answer
        self.rows = lru_cache(16)(partial(Rows, mesh))
