"""Finds the blocks that a mask leaves empty for a rank: they are neither sent nor computed.

What a causal mask hides follows from places alone (`tiles.needs`). A mask that is a tensor is looked at by each rank,
for its own rows, and the answers are gathered: one all-gather of a number per block, once per mask tensor and version.
Of a tile that it sees in part a rank computes the rectangle in which it sees anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._communication.collectives import all_gather
from .._layouts.mesh import Mesh
from .._layouts.region import Ranges
from .described import Held
from .tiles import Tile, needs, tiles

Table = tuple[tuple[bool, ...], ...]
"""[rank][block]"""
_MEMO = "_context_blocks"


class Seen(NamedTuple):
    """Table of whether a rank's rows see any column of a block, and this rank's tiles of each block."""

    table: Table
    tiles: tuple[tuple[Tile, ...], ...]


def blocks_seen(
    mesh: Mesh, axis: int, rows: tuple[Ranges, ...], columns: tuple[Ranges, ...], causal: bool,
    mask: Tensor | Held | None,
) -> Seen:  # fmt: skip
    """Returns what is to be computed where. The same table on all ranks."""
    if isinstance(mask, Held):
        if mask.known is None or mask.known[0] != (mesh, axis, columns):
            found = mask.tiles(columns)
            mask.known = (mesh, axis, columns), _told(found, mesh, axis, mask.device)
        return mask.known[1]
    mine = rows[mesh.coordinate[axis]]
    table, own = needs(rows, columns, causal), tuple(tiles(mine, block, causal) for block in columns)
    if mask is None or mask.shape[-1] == 1 or mask.device.type == "meta":
        return Seen(table, own)
    key = (mask._version, mesh, axis, rows, columns)
    known = mask.__dict__.get(_MEMO)
    if known is None or known[0] != key:
        found = tuple(_trimmed(mask.detach(), block) for block in own)
        known = key, _told(found, mesh, axis, mask.device)
        setattr(mask, _MEMO, known)
    return known[1]


def _told(found: tuple[tuple[Tile, ...], ...], mesh: Mesh, axis: int, device: torch.device) -> Seen:
    """All ranks' tables of this rank's tiles."""
    answer = torch.tensor([bool(block) for block in found], dtype=torch.uint8, device=device)
    answers = all_gather(answer, mesh, (axis,), "blocks_seen")
    return Seen(tuple(tuple(bool(each) for each in row) for row in answers.tolist()), found)


def _trimmed(mask: Tensor, block: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """Trims each tile to the rectangle outside of which the mask hides all. One wait for the device."""
    bounds = [_bounds(mask, tile) for tile in block]
    found = []
    for tile, (top, bottom, left, right) in zip(block, torch.stack(bounds).tolist() if bounds else ()):
        if top < bottom and left < right:
            start, first, place = tile.rows[0], tile.columns[0], tile.places[0]
            found.append(
                Tile((start + top, start + bottom), (first + left, first + right), (place + left, place + right))
            )
    return tuple(found)


def _bounds(mask: Tensor, tile: Tile) -> Tensor:
    """[4]: the first row that sees anything and the one after the last, the same of columns."""
    part = mask[..., slice(*tile.places)]
    part = part[..., slice(*tile.rows), :] if part.ndim > 1 and part.shape[-2] > 1 else part
    part = part if part.dtype == torch.bool else part > -torch.inf
    part = part.reshape(-1, *part.shape[-2:]).any(0) if part.ndim > 1 else part.unsqueeze(0)
    rows = part.any(1).expand(tile.rows[1] - tile.rows[0])
    return torch.stack([*_ends(rows), *_ends(part.any(0))])


def _ends(seen: Tensor) -> tuple[Tensor, Tensor]:
    """The first true index and the one after the last; (n, 0) where none is."""
    places = torch.arange(len(seen), device=seen.device)
    return torch.where(seen, places, len(seen)).min(), torch.where(seen, places + 1, 0).max()
