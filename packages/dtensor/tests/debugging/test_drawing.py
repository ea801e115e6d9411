"""Pictures of layouts: every element is in the rectangles of the ranks that hold it."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from vescale_dtensor._layouts.drawing import draw, parts
from vescale_dtensor._layouts.layout import Layout, layout_of
from vescale_dtensor._layouts.mesh import Mesh
from vescale_dtensor._layouts.state import INVARIANT, PARTIAL, REPLICATE, flat, sharded

MESH = Mesh((2, 4), ("dp", "tp"), (0, 0))
STATES = {
    "sharded": (INVARIANT, sharded(0)),
    "partial": (PARTIAL, sharded(1)),
    "both dims": (sharded(0), sharded(1)),
    "twice": (sharded(1), sharded(1)),
    "interleaved": (REPLICATE, sharded(0, 2)),
    "ragged": (REPLICATE, sharded(1, 1, (1, 2, 0, 3))),
    "flat": (flat(2, (24, 48)), sharded(1)),
    "replicated": (REPLICATE, REPLICATE),
}


@pytest.mark.parametrize("name", STATES)
def test_the_rectangles_of_a_rank_are_what_it_holds(name: str) -> None:
    layout = layout_of(MESH, STATES[name], (12, 24))
    held = {rank: places for places, ranks in parts(layout, [0, 1]).items() for rank in ranks}
    counts = [[0] * 24 for _ in range(12)]
    for rank, coordinate in enumerate(product(range(2), range(4))):
        places = held.get(rank, ())
        area = sum((bottom - top) * (right - left) for (top, bottom), (left, right) in places)
        assert area == math.prod(layout.shape_at(coordinate))
        for (top, bottom), (left, right) in places:
            for row, column in product(range(top, bottom), range(left, right)):
                counts[row][column] += 1
    times = math.prod(n for n, state in zip(MESH.sizes, layout.states) if state.kind in "PIR")
    assert {count for row in counts for count in row} == {times}


def texts(layout: Layout) -> tuple[list[str], str]:
    """What is written in a picture, and all of it."""
    svg = draw(layout).svg
    return [one.text or "" for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("text")], svg


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7,), (2, 3, 5), (4096, 16384), (8, 1)])
@pytest.mark.parametrize("states", [(INVARIANT, REPLICATE), (PARTIAL, REPLICATE), (sharded(0), PARTIAL)])
def test_every_shape_has_a_picture_that_names_all_ranks(shape: tuple[int, ...], states: tuple) -> None:
    if not shape and states[0].is_sharded:
        states = (PARTIAL, PARTIAL)
    layout = layout_of(MESH, states, shape)
    _, svg = texts(layout)
    assert svg.startswith("<svg") and ("url(#partial)" in svg) == (layout.is_partial and 0 not in shape)
    named = set()
    for title in [one.text for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("title")][1:]:
        named |= {int(word.strip(",")) for word in title.split()[1:]}
    missing = {int(word.strip(",;")) for word in draw(layout).caption.partition("nothing on ")[2].split()[1:]}
    assert named | missing == set(range(8)) and not named & missing


def test_the_caption_says_what_to_see(tmp_path: Path) -> None:
    picture = draw(layout_of(MESH, (PARTIAL, sharded(2)), (3, 4, 8)))
    written, _ = texts(layout_of(MESH, (PARTIAL, sharded(2)), (3, 4, 8)))
    assert written[0] == "[3, 4, 8] on (dp=2, tp=4)"
    assert "dp: hatched, each of 2 ranks holds a summand of every element" in written
    assert "tp: dim 2 is cut, Shard(dim=2) over 4 ranks" in written
    assert {"dim 0: 3", "dim 2: 8", "ranks 0, 4", "ranks 3, 7"} <= set(written)
    assert any(one.startswith("not drawn: dim 1") for one in written)
    assert picture.save(tmp_path / "one.svg").read_text(encoding="utf-8") == picture._repr_svg_()


def test_many_ranks_are_told_by_their_number() -> None:
    written, _ = texts(layout_of(Mesh((64,), ("dp",), (0,)), (INVARIANT,), (8, 8)))
    assert "64 ranks: 0, 1, ... 63" in written
