"""Looks at the float8 numbers that linear layers multiply: whole, on every mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from vescale_dtensor import from_local
from vescale_dtensor._rules.products.scaled import Float8, Scaling
from vescale_dtensor.placement import Placement, Replicate, Shard


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
            mesh = self.mesh.device_mesh
            assert mesh is not None
            found.append(from_local(local, mesh, places).full_tensor())
        return made

    with patch.object(Scaling, "quantised", seen):
        yield found
