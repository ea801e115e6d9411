"""Packing: properties of every placement, and the padding and time of large models' lists."""

from __future__ import annotations

import itertools
import random

import pytest

from vescale_plans._zero.packing import pack


def check(sizes, ranks, blocks, align):
    """Every tensor once, none over another, aligned, and no border inside a block."""
    found = pack(sizes, ranks, blocks=blocks, align=align)
    spans = sorted((start, start + size) for start, size in zip(found.starts, sizes))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= found.total == found.part * ranks and found.part % align == 0
    for i, (start, size, block) in enumerate(zip(found.starts, sizes, blocks)):
        assert start % align == 0
        for border in range(found.part, found.total, found.part):
            if start < border < start + size:
                assert (border - start) % block == 0
        units = found.units(i, size)
        assert sum(units) == size and len(units) == ranks
        assert [found.held(i, size, r) for r in range(ranks)] == [
            (sum(units[:r]), sum(units[: r + 1])) if units[r] else found.held(i, size, r) for r in range(ranks)
        ]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_any_list(seed) -> None:
    r = random.Random(seed)
    ranks, align = r.choice([1, 2, 3, 4, 8]), r.choice([1, 4, 16])
    rows = [
        (r.randrange(1, 40), r.choice([1, 3, 8, 16, 40]), r.choice([1, 1, 2, 5])) for _ in range(r.randrange(1, 30))
    ]
    sizes = [n * width for n, width, _ in rows]
    blocks = [width * k if k > 1 or r.random() < 0.5 else 1 for _, width, k in rows]
    check(sizes, ranks, blocks, align)


def test_without_blocks_nothing_but_alignment_is_padded() -> None:
    found = check([10, 20, 31], 2, [1, 1, 1], 1)
    assert found.part == 31 and found.starts == (0, 10, 30) and found.total == 61 + 1
    assert found.units(2, 31) == (1, 30)


def test_a_border_in_a_block_moves_to_its_edge() -> None:
    found = check([6, 6, 6, 6], 2, [1, 6, 6, 1], 1)
    assert found.total == 24
    assert check([5, 9], 2, [1, 9], 1).part == 9  # 9 cannot be split, 5 goes to the other rank


def test_nothing_and_less_than_a_rank_each() -> None:
    assert pack([], 4).total == 4
    assert check([1], 4, [1], 1).units(0, 1) == (1, 0, 0, 0)
