"""Looks at the float8 numbers that linear layers multiply: whole, on every mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from .._rules.products.scaled import Float8, Scaling
from .._tensor.construct import from_local
from ..placement import Placement, Replicate, Shard


@contextlib.contextmanager
def operands_seen() -> Iterator[list[Tensor]]:
    """A block in which all that is quantised is gathered into the list: bits of numbers, and scales, in turn. Rows that
    are cut are cut along the first dim."""
    found: list[Tensor] = []
    own = Scaling.quantised

    def seen(self: Scaling, tensor: Tensor, names: str, along: int, dtype: torch.dtype, scale: Tensor | None) -> Float8:
        made, last = own(self, tensor, names, along, dtype, scale), tensor.ndim - 1
        kept = names[1 - along] if self.recipe.by_row else ""
        for local, cut in ((made.numbers.view(torch.uint8), names), (made.scale, kept)):
            places: list[Placement] = [Replicate()] * self.mesh.ndim
            for name in cut:
                for axis in self.axes[name]:
                    places[axis] = Shard(0 if name == names[0] else last)
            found.append(from_local(local, self.mesh.device_mesh, places).full_tensor())
        return made

    with patch.object(Scaling, "quantised", seen):
        yield found
