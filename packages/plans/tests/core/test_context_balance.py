"""Sequences cut so that attention is the same work on every rank: pairs counted, of the tiles that a ring computes."""

import random

import pytest
import torch

from vescale_dtensor import InterleavedShard, Shard, zigzag
from vescale_dtensor._context.empty import _trimmed
from vescale_dtensor._context.tiles import tiles
from vescale_dtensor.engine import cut_ranges
from vescale_plans._apply.balance import order_for
from vescale_testkit import slice_of


def pairs_of(tile):
    """How much attention a tile is: pairs of a row and a column."""
    rows, columns = tile.rows[1] - tile.rows[0], tile.columns[1] - tile.columns[0]
    if not tile.triangle:
        return rows * columns
    full = max(0, rows - columns)  # rows that see all columns
    short = rows - full
    return full * columns + short * (short + 1) // 2


def spread(order, size, ranks, mask=None):
    """The most pairs that a rank computes over the least, less one; without a mask causal by places."""
    cuts = cut_ranges(Shard(0) if order is None else InterleavedShard(0, 1, order), size, ranks)
    work = []
    for mine in cuts:
        found = [tile for block in cuts for tile in _tiles(mine, block, mask)]
        work.append(sum(map(pairs_of, found)))
    return max(work) / min(work) - 1


def _tiles(mine, block, mask):
    if mask is None:
        return tiles(mine, block, True)
    rows = mask[torch.cat([torch.arange(*held) for held in mine])]
    return _trimmed(rows, tiles(mine, block, False))


def causal(size):
    at, to = torch.arange(size)[:, None], torch.arange(size)
    return to <= at, at - to


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_causal_mask(ranks):
    order = order_for(1024, ranks, (None,))
    assert order == zigzag(ranks)
    assert spread(order, 1024, ranks) <= 0.05 and spread(order, 1024, ranks, causal(1024)[0]) <= 0.05
    assert spread(None, 1024, ranks) > 1.5  # what it is for


WINDOWS = [(ranks, window) for ranks in (2, 4) for window in (32, 100, 256, 341, 700)]


@pytest.mark.parametrize(("ranks", "window"), slice_of(WINDOWS, 3))
def test_a_sliding_window(ranks, window):
    seen, away = causal(1024)
    order = order_for(1024, ranks, (window,))
    assert spread(order, 1024, ranks, seen & (away < window)) <= 0.05


def test_packed_documents():
    """Twenty random packings, all with VESCALE_GRID=full."""
    draw, size, ranks = random.Random(0), 2048, 4
    packings = [(0, *sorted(draw.sample(range(1, size), draw.randint(1, 12)))) for _ in range(20)]
    for starts in slice_of(packings, 7):
        document = torch.zeros(size, dtype=torch.long).index_fill_(0, torch.tensor(starts), 1).cumsum(0)
        mask = causal(size)[0] & (document[:, None] == document)
        order = order_for(size, ranks, (None,), (starts,))
        assert spread(order, size, ranks, mask) <= 0.1, starts
