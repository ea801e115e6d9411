"""The members of a list of experts: whose they are, where they lie, and what calls of their block have told of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from vescale_dtensor.engine import REPLICATE, Mesh, State

from ..local_rows import swap_in
from ..route import Spread
from ..split import refuse_unsplit, split_axes
from .rows import Rows
from .shared import SharedState


class Members:
    """See the module.

    Arguments:
        block: calls them.
        name: of the list, by the root.
        count: of the experts of all ranks.
        axis: the mesh axis over which they are spread.
    """

    def __init__(self, block: nn.Module, name: str, count: int, mesh: Mesh, axis: str) -> None:
        self.block, self.name, self.key = block, name, name.rpartition(".")[2]
        self.modules: nn.ModuleList = getattr(block, self.key)
        self.mesh, at = mesh, mesh.names.index(axis)
        self.spread = Spread(name, mesh, at, count)
        self.split, whole = split_axes(self.modules.named_parameters(), at)
        refuse_unsplit(name, mesh, self.modules.named_parameters(), whole)
        self.load = [0] * self.spread.local
        self.replicas: tuple[int, ...] = ()
        self.gives: torch.dtype | None = None  # of an expert's answer
        self.state = SharedState(self.spread, self.modules, self.split, self.on_every_rank())
        self.rows = lru_cache(16)(partial(Rows, mesh))

    def compute(self, index: int, rows: Tensor, states: tuple[State, ...]) -> Tensor:
        """One expert of this rank's, on plain tensors: `states` are the layout's of all rows."""
        states = tuple(REPLICATE if axis in self.split else state for axis, state in enumerate(states))
        member, kept = self.modules[index], []
        try:
            for module in member.modules():
                kept.append((module, swap_in(module, states, f"{self.spread.name}.{index}")))
            return member(rows)
        finally:
            for module, parameters in kept:
                module._parameters.update(parameters)

    def around(self) -> Iterator[tuple[str, nn.Module]]:
        """The block and the modules that it calls besides its experts, by their names in the block."""
        for name, module in self.block.named_modules():
            if name != self.key and not name.startswith(f"{self.key}."):
                yield name, module

    def on_every_rank(self) -> tuple[str, str]:
        """The remedy of a plan that computes the block as it computes any module."""
        return f'"{self.spread.name}.*": {{"{self.mesh.names[self.spread.axis]}": Replicate()}}', "whole"
