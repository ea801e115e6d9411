"""Which blocks a mask leaves empty for which rank: they are neither sent nor computed.

What a causal mask hides follows from places alone (`tiles.needs`). A mask that is a tensor is looked at by each rank,
for its own rows, and the answers are gathered: one all-gather of a number per block, once per mask tensor and version.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._communication.collectives import all_gather
from .._layouts.mesh import Mesh
from .._layouts.region import Ranges
from .tiles import needs, tiles

Table = tuple[tuple[bool, ...], ...]
"""[rank][block]"""
_MEMO = "_context_blocks"


def blocks_seen(
    mesh: Mesh, axis: int, rows: tuple[Ranges, ...], columns: tuple[Ranges, ...], causal: bool, mask: Tensor | None
) -> Table:
    """Whether a rank's rows see any column of a block."""
    table = needs(rows, columns, causal)
    if mask is None or mask.shape[-1] == 1 or mask.device.type == "meta":
        return table
    key = (mask._version, mesh, axis, rows, columns)
    known = mask.__dict__.get(_MEMO)
    if known is None or known[0] != key:
        known = key, _asked(mesh, axis, rows, columns, mask.detach())
        setattr(mask, _MEMO, known)
    return tuple(tuple(a and b for a, b in zip(*each)) for each in zip(table, known[1]))


def _asked(mesh: Mesh, axis: int, rows: tuple[Ranges, ...], columns: tuple[Ranges, ...], mask: Tensor) -> Table:
    mine = rows[mesh.coordinate[axis]]
    seen = []
    for block in columns:
        found = [_sees(mask[..., slice(*tile.places)]) for tile in tiles(mine, block, False)]
        seen.append(torch.stack(found).any() if found else mask.new_zeros((), dtype=torch.bool))
    answers = all_gather(torch.stack(seen).to(torch.uint8), mesh, (axis,), "blocks_seen")
    return tuple(tuple(bool(each) for each in row) for row in answers.tolist())


def _sees(mask: Tensor) -> Tensor:
    return mask.any() if mask.dtype == torch.bool else (mask > -torch.inf).any()
