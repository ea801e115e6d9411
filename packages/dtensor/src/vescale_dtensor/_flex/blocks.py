"""A block mask cut with the rows, and functions of places that are told global ones.

A `BlockMask` lists, per sequence, head and block of rows, the blocks of columns that are seen at all (and those that
are all seen), and has the function that says of each pair. Lists are cut by index. The function, like a `score_mod`,
counts sequences, heads and rows from 0, which on a shard is not the global place: it is called with these.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from .._layouts.region import Ranges

BY_ROWS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
LISTS = (
    *BY_ROWS, "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
    "dq_write_order", "dq_write_order_full", "dq_kv_order",
)  # fmt: skip
"""The lists of a BlockMask, each [batch, heads, ...]; the last three only in later versions of torch."""
WHOLE = 1 << 30
"""The edge of a block that stands for all there is, which torch does not hold against a mask's lengths."""


class Places(NamedTuple):
    """The global indices of the sequences, heads and rows that a rank holds; None for all of them, in order."""

    batch: Ranges | None = None
    heads: Ranges | None = None
    rows: Ranges | None = None


ALL = Places()


def is_aligned(rows: Ranges, edge: int, length: int) -> bool:
    """True if rows held in this order are whole blocks of `edge`, but for the sequence's last, which must come last."""
    for at, (start, stop) in enumerate(rows):
        ends = stop % edge == 0 or (stop == length and at == len(rows) - 1)
        if start % edge or not ends:
            return False
    return True


def cut(mask: BlockMask, places: Places, mask_mod: Callable) -> BlockMask:
    """The mask of this rank's shard, with `mask_mod` as its function; lists of one sequence or head are for all."""
    rank = copy(mask)
    rank.mask_mod = mask_mod
    for name in LISTS:
        lists = getattr(mask, name, None)
        if lists is not None:
            for dim, ranges in enumerate((places.batch, places.heads)):
                lists = lists if ranges is None or lists.shape[dim] == 1 else _taken(lists, dim, ranges)
            setattr(rank, name, lists)
    if places.rows is None:
        return rank
    edge = mask.BLOCK_SIZE[0]
    blocks = tuple((start // edge, -(-stop // edge)) for start, stop in places.rows)
    taken = [None if (lists := getattr(rank, name)) is None else _taken(lists, 2, blocks) for name in BY_ROWS]
    length = sum(stop - start for start, stop in places.rows)
    return BlockMask.from_kv_blocks(
        *taken, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask_mod, seq_lengths=(length, mask.seq_lengths[1]),
        compute_q_blocks=mask.q_indices is not None,
    )  # fmt: skip


def _taken(lists: Tensor, dim: int, ranges: Ranges) -> Tensor:
    pieces = [lists.narrow(dim, start, stop - start) for start, stop in ranges]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim)


def at_global(mod: Callable | None, places: Places, device: torch.device, scores: bool) -> Callable | None:
    """A `score_mod`, which takes the score first, or a `mask_mod` that is told global places."""
    if mod is None or mod is noop_mask or not any(map(_moves, places)):  # torch knows the one that masks nothing
        return mod
    batch, heads, rows = (_there(ranges, device) for ranges in places)

    def score_mod(score, b, h, q_idx, kv_idx):
        return mod(score, batch(b), heads(h), rows(q_idx), kv_idx)

    def mask_mod(b, h, q_idx, kv_idx):
        return mod(batch(b), heads(h), rows(q_idx), kv_idx)

    return score_mod if scores else mask_mod


def _moves(ranges: Ranges | None) -> bool:
    return ranges is not None and (len(ranges) > 1 or ranges[0][0] > 0)


def _there(ranges: Ranges | None, device: torch.device) -> Callable:
    """Maps a local index to the global one."""
    if ranges is None or not _moves(ranges):
        return lambda index: index
    if len(ranges) == 1:
        start = ranges[0][0]
        return lambda index: index + start
    held = [torch.arange(start, stop, dtype=torch.int32, device=device) for start, stop in ranges]
    table = torch.cat(held)
    return lambda index: table[index]
