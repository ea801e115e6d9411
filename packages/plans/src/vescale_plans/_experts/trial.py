"""The forward of a stacked experts module on rows of our own and this rank's slices, outside of its calls: what it
counts its experts by, and what it writes of itself, is seen there at no cost of communication."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from vescale_trace.effects import Kept

from .._apply.generators import random_states, set_random_states
from .counters import counts_of
from .route import Spread
from .told import Stack, Told

LENT = ("forward", "_call_impl")
"""Attributes of a module that this library writes."""


class Trial:
    """Trial runs of one call, with tokens, indices and weights replaced. The module is as it was after each method."""

    def __init__(self, spread: Spread, stack: Stack, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._spread, self._module, self._held = spread, module, dict(module._parameters)
        self._told = Told(spread.name, stack, args, kwargs)
        self.like, self.width = self._told.tokens.to_local().detach(), self._told.tokens.shape[-1]

    def forward(
        self, parameters: Mapping[str, Tensor], rows: Tensor, experts: Tensor, numbers: Mapping[str, int]
    ) -> Tensor:
        """Its output [rows, hidden]; `experts`: of every row one. `numbers`: attributes meanwhile."""
        local = next(len(one) for one in parameters.values() if one.ndim == 3)
        args, kwargs = self._told.arguments(rows, experts[:, None], rows.new_ones(len(rows), 1), local)
        self._module._parameters.update(parameters)
        for name, number in numbers.items():
            setattr(self._module, name, number)
        try:
            return self._told.in_order(self._module.forward(*args, **kwargs))
        finally:
            self._module._parameters.update(self._held)
            for name in numbers:
                setattr(self._module, name, self._spread.experts)

    def slices(self, which: slice) -> dict[str, Tensor]:
        """The parameters of some of this rank's experts."""
        axis, local = self._spread.axis, {}
        for key, one in self._held.items():
            if one is not None:
                cut = one.mesh_layout.states[axis].is_sharded or self._spread.ranks == 1
                part = one.to_local().detach()
                local[key] = part[which] if cut and part.shape[:1] == (self._spread.local,) else part
        return local

    def written(self, numbers: list[str]) -> tuple[str, ...]:
        """Returns what the forward writes of the module itself, as this rank sees it. `numbers`: that count experts."""
        local, kept, states = self._spread.local, Kept(self._module, LENT), random_states()
        each = torch.arange(local, device=self.like.device)
        for replaced in (numbers, []):  # where it raises, a buffer may have a place for every expert of all ranks
            with suppress(Exception):  # what it wrote until then counts
                self.forward(self.slices(slice(None)), self._rows(), each, dict.fromkeys(replaced, local))
                break
        found = tuple(slot.name for slot in kept.written())
        kept.restore()
        set_random_states(states)
        return found

    def counters(self, numbers: tuple[list[str], list[str]]) -> list[str]:
        """The attributes that count experts, by trial where their names do not say it; see `counters.py`."""
        spread, states = self._spread, random_states()
        kept = Kept(self._module, LENT)
        try:
            with torch.no_grad():
                rows = self._rows()
                return counts_of(spread.name, self.forward, self.slices, numbers, spread.local, spread.experts, rows)
        finally:
            kept.restore()
            set_random_states(states)

    def _rows(self) -> Tensor:
        """One for each expert of this rank."""
        return torch.randn(self._spread.local, self.width, generator=torch.Generator().manual_seed(0)).to(self.like)
