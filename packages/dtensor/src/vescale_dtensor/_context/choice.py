"""Chooses the way attention over a cut sequence is computed, and says why.

Per rank and forward, in bytes received over the axis of n ranks (k: a rank's keys and values, q: its queries and
result together):

    gather       (n - 1) k            and backward (n - 1) k; all keys and values are held until backward
    ring         (n - 1) k, causal half of it on average; backward twice that; hidden under products
    all-to-all   (n - 1)/n (q + k), and backward the same; needs heads that n divides

A transfer is hidden where a block's products take longer: 4 l s E operations for 2 s E numbers, whatever the heads
share. So a ring is taken from HIDDEN rows of queries per key head and rank on; below that what moves least, and gather
for what is so short that the number of messages decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from .._layouts.mesh import Mesh
from .._rules.registry import TABLE
from .pins import pins

RING, HEADS, GATHER, AUTO = "ring", "all-to-all", "gather", "auto"
WAYS = (AUTO, RING, HEADS, GATHER)
HIDDEN = 2048
"""Rows of queries that meet a block, of all heads that share its keys, from which its products take longer than its
transfer: a current GPU computes some 2000 operations in the time of a byte from another, and a row is 2 for 1."""
SHORT = 1 << 20
"""Bytes of all keys and values of a rank's heads, up to which one message is better than n - 1."""


@dataclass(frozen=True)
class Problem:
    """Sizes on one rank: rows of queries and columns of keys that it holds, heads, bytes of a row of q with the
    result's and of k with v's."""

    ranks: int
    rows: int
    columns: int
    heads: int
    key_heads: int
    query_bytes: int
    key_bytes: int


@dataclass(frozen=True)
class Choice:
    """The way taken, and the reason in words."""

    way: str
    reason: str


def pin(mesh: Mesh, axis: int, way: str) -> None:
    """Makes attention over `axis` go that way, if it can, from now on."""
    if pins.get(mesh, {}).get(axis) != way:
        pins.setdefault(mesh, {})[axis] = way
        TABLE[F.scaled_dot_product_attention].cache.clear()  # what was decided before


def pinned(mesh: Mesh, axis: int) -> str:
    return pins.get(mesh, {}).get(axis, AUTO)


def attention_way(ranks: int, rows: int, shared: int, key_bytes: int) -> str:
    """Returns `chosen`'s way for so many rows of each rank, heads that share their keys, and bytes of a row of k and v
    of all heads, if heads do not divide."""
    return chosen(Problem(ranks, rows, rows, shared, 1, key_bytes, key_bytes), AUTO, False).way


def chosen(problem: Problem, pinned: str, can_swap: bool) -> Choice:
    """can_swap: whether heads divide, and nothing else stands against an all-to-all."""
    if pinned == HEADS and not can_swap:
        return Choice(RING, f"all-to-all is pinned, but {problem.heads} heads do not divide by {problem.ranks} ranks")
    if pinned != AUTO:
        return Choice(pinned, "pinned by the plan")
    held = problem.ranks * problem.columns * problem.key_heads * problem.key_bytes
    if held <= SHORT:
        return Choice(GATHER, f"all keys and values are {held} bytes: one message")
    shared = problem.rows * problem.heads // max(problem.key_heads, 1)
    if shared >= HIDDEN:
        return Choice(RING, f"{shared} rows of queries meet each block: its products hide the next one's transfer")
    away = problem.ranks - 1
    key = problem.columns * problem.key_heads * problem.key_bytes
    ring = 3 * away * key
    swap = 2 * away / problem.ranks * (problem.rows * problem.heads * problem.query_bytes + key)
    if can_swap and swap < ring:
        return Choice(HEADS, f"{swap:.0f} bytes received, forward and backward, where a ring receives {ring}")
    return Choice(RING, f"{ring} bytes received, forward and backward, in blocks")
