"""Context parallelism in closed form: what attention over a cut sequence sends and holds.

A ring's block is attended while the next is under way: what is sent shows where products are shorter, and the first of
n - 1 always does a little. Sequences are dealt out so that causal work is the same on all ranks (`_apply/balance.py`);
where they are not, one rank has up to twice the work of the mean, which is what attention is priced as anyway: every
position meets every other.
"""

from __future__ import annotations

from vescale_dtensor.engine import RING, attention_way

from ..candidates import Candidate
from .hardware import Hardware
from .sizes import Branch, Sizes

BACK = 1.5
"""Mean of both directions over forward, in a ring: backward sends the blocks again, and their gradients home."""
BLOCKS = 4
"""Blocks of keys and values that a ring's backward holds beside its own: two foreign ones, and their gradients."""
SHOWN = 0.05
"""Share of a ring's transfers that no product hides."""


def meeting_seconds(
    sizes: Sizes, candidate: Candidate, hardware: Hardware, positions: int, seq: int, attended: float
) -> float:
    """Mean of both directions, over all attention of `sizes`: `positions` of one rank in sequences of `seq`, whose
    products take `attended` seconds forward."""
    if candidate.cp == 1:
        return 0.0
    sent, hidden = 0.0, False
    for branch, times in sizes.branches.items():
        if not branch.positions_meet:
            continue
        width, ranks = keys(branch) / (candidate.tp if branch.split else 1), candidate.cp
        way = _way(branch, candidate, positions, seq)
        hidden = hidden or way == RING
        if way == RING:
            block, apart = positions * width * hardware.itemsize, candidate.tp * ranks // 2
            sent += times * BACK * (ranks - 1) * hardware.collective_seconds("send", 2, block, apart)
        else:
            moved = (ranks - 1) * positions * width * hardware.itemsize
            sent += times * hardware.collective_seconds("all_gather", ranks, moved, candidate.tp)
    return max(SHOWN * sent, sent - BACK * attended) if hidden else sent


def meeting_bytes(sizes: Sizes, candidate: Candidate, hardware: Hardware, positions: int, seq: int) -> float:
    """Bytes of others' blocks that a rank holds at a time."""
    if candidate.cp == 1:
        return 0.0
    found = [0.0]
    for branch in sizes.branches:
        if branch.positions_meet:
            block = positions * keys(branch) / (candidate.tp if branch.split else 1) * hardware.itemsize
            is_ring = _way(branch, candidate, positions, seq) == RING
            found.append(block * (BLOCKS if is_ring else 2 * candidate.cp))
    return max(found)


def keys(branch: Branch) -> int:
    """Features of keys and values together: what feeds the sink beside queries, which have as many as it."""
    return max(0, branch.inner - 2 * branch.features) or 2 * branch.features


def _way(branch: Branch, candidate: Candidate, positions: int, seq: int) -> str:
    """Chooses the way as attention itself does. Heads as far as widths tell: so many as share their keys, and no
    all-to-all."""
    rows = max(1, seq // candidate.cp)
    shared = max(1, round(2 * branch.features / keys(branch)))
    width = max(1, round(positions / rows)) * keys(branch) // (candidate.tp if branch.split else 1)
    return attention_way(candidate.cp, rows, shared, width * 4)
