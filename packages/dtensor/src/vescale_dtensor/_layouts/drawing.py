"""A picture of a layout: which rank holds which part of the tensor, and where only a part of a sum. Pure.

A tensor is drawn as its first two dims that are cut, or else its first two: rows downwards, columns to the right. A
colour is one part of the tensor; hatched is what is a part of a sum.
"""

from __future__ import annotations

import itertools
from html import escape
from pathlib import Path

from .layout import Layout

# Told apart by most who see colours otherwise (Okabe and Ito), lightened so that black text is read on all of them.
COLOURS = ("#9ad1f5", "#f7c873", "#8fd9b6", "#f0a58f", "#d9b3d0", "#f5ee9e", "#8fb4d9", "#d0d0d0")
WIDTH, HEIGHT, LEFT, TOP = 480, 240, 70, 64
_LEAST_SIDE, _LETTER, _LINE = 56, 6.6, 16
_MOST_CHARACTERS = 84
HATCH = (
    '<defs><pattern id="partial" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="0" y1="0" x2="0" y2="8" stroke="#000" stroke-opacity="0.35" stroke-width="3"/></pattern></defs>'
)
Rectangle = tuple[tuple[int, int], tuple[int, int]]


class Picture:
    """An SVG that notebooks show. `svg` is its text; `save(path)` writes it."""

    def __init__(self, svg: str, caption: str) -> None:
        self.svg, self.caption = svg, caption

    def save(self, path: str | Path) -> Path:
        """Writes the SVG, replacing what is there."""
        path = Path(path)
        path.write_text(self.svg, encoding="utf-8")
        return path

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<picture: {self.caption}>"


def draw(layout: Layout) -> Picture:
    """The picture of a layout."""
    shown = shown_dims(layout)
    width, height = _sides(*_extents(layout, shown))
    held = parts(layout, shown)
    drawn = rectangles(layout, held, shown, (LEFT, TOP, width, height))
    captions = _captions(layout, shown)
    empty = sorted(set(_ranks(layout)) - set(itertools.chain.from_iterable(held.values())))
    if empty:
        captions.append(f"nothing on {_listed(empty)}")
    lines = list(itertools.chain.from_iterable(map(_wrapped, captions[1:])))
    total_width = LEFT + WIDTH + 40
    total_height = TOP + height + 30 + _LINE * len(lines)
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {total_height:.0f}" width="{total_width}" '
        f'height="{total_height:.0f}" role="img" font-family="sans-serif" font-size="12">',
        f"<title>{escape(captions[0])}</title>",
        HATCH,
        f'<rect width="{total_width}" height="{total_height:.0f}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="14" font-weight="bold">{escape(captions[0])}</text>',
        *_axes(layout, shown, width, height),
        *drawn,
    ]
    for i, line in enumerate(lines):
        text.append(f'<text x="{LEFT}" y="{TOP + height + 22 + _LINE * i:.0f}">{escape(line)}</text>')
    return Picture("\n".join([*text, "</svg>"]), "; ".join(captions))


def shown_dims(layout: Layout) -> list[int]:
    """The dims that a picture has: two at most, those that are cut first."""
    dims = range(len(layout.shape))
    cut = [dim for dim in dims if layout.axes_of(dim) or layout.flat_axis is not None]
    return sorted((cut + [dim for dim in dims if dim not in cut])[:2])


def rectangles(
    layout: Layout, held: dict[tuple[Rectangle, ...], list[int]], shown: list[int], within: tuple[float, ...]
) -> list[str]:
    """SVG of what `parts` found, in the rectangle (x, y, width, height)."""
    x, y, width, height = within
    rows, columns = _extents(layout, shown)
    by_place: dict[Rectangle, list[int]] = {}
    for places, ranks in held.items():
        for place in places:
            by_place.setdefault(place, []).extend(ranks)
    drawn = []
    for i, places in enumerate(held):
        for place in places:
            (top, bottom), (left, right) = place
            at = (x + width * left / columns, y + height * top / rows)
            sides = (width * (right - left) / columns, height * (bottom - top) / rows)
            colour = COLOURS[i % len(COLOURS)]
            drawn.append(_part(*at, *sides, colour, sorted(by_place[place]), hatched=layout.is_partial))
    return drawn


def _extents(layout: Layout, shown: list[int]) -> tuple[int, int]:
    """Rows and columns of the picture."""
    extents = [max(layout.shape[dim], 1) for dim in shown]
    return (extents[0], extents[1]) if len(extents) == 2 else (1, *(extents or [1]))


def parts(layout: Layout, shown: list[int]) -> dict[tuple[Rectangle, ...], list[int]]:
    """The rectangles that ranks hold, as (rows, columns) of the dims `shown`, and which ranks hold just these."""
    found: dict[tuple[Rectangle, ...], list[int]] = {}
    for rank, coordinate in zip(_ranks(layout), _coordinates(layout)):
        rectangles = []
        for ranges, _ in layout.boxes_at(coordinate):
            sides = [ranges[dim] for dim in shown]
            rectangles.append((sides[0], sides[1]) if len(sides) == 2 else ((0, 1), sides[0] if sides else (0, 1)))
        if rectangles:
            found.setdefault(tuple(dict.fromkeys(rectangles)), []).append(rank)
    return found


def _coordinates(layout: Layout) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, layout.mesh.sizes)))


def _ranks(layout: Layout) -> list[int]:
    """The rank at each coordinate; of a mesh of mere geometry, its number."""
    mesh = layout.mesh.device_mesh
    return list(range(len(_coordinates(layout)))) if mesh is None else mesh.mesh.flatten().tolist()


def _sides(rows: int, columns: int) -> tuple[float, float]:
    """Width and height in pixels: in proportion as far as both can be read."""
    ratio = min(max(columns / rows, 0.25), 8.0)
    width, height = (WIDTH, WIDTH / ratio) if WIDTH / ratio <= HEIGHT else (HEIGHT * ratio, HEIGHT)
    return max(width, 4 * _LEAST_SIDE), max(height, _LEAST_SIDE)


def _part(x: float, y: float, w: float, h: float, colour: str, ranks: list[int], *, hatched: bool) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
    said = _listed(ranks)
    text = f'<g><title>{said}</title><rect {where} fill="{colour}" stroke="#333"/>'
    if hatched:
        text += f'<rect {where} fill="url(#partial)"/>'
    for label in (said, ", ".join(map(str, ranks))):
        if len(label) * _LETTER <= w and h >= 13:
            text += f'<text x="{x + w / 2:.1f}" y="{y + h / 2 + 4:.1f}" text-anchor="middle">{label}</text>'
            break
    return text + "</g>"


def _axes(layout: Layout, shown: list[int], width: float, height: float) -> list[str]:
    """The names and sizes of the two dims."""
    names = [f"dim {dim}: {layout.shape[dim]}" for dim in shown]
    found = []
    if names:
        found.append(f'<text x="{LEFT + width / 2:.0f}" y="{TOP - 10}" text-anchor="middle">{names[-1]}</text>')
    if len(names) == 2:
        x, y = LEFT - 12, TOP + height / 2
        turn = f'transform="rotate(-90 {x} {y:.0f})"'
        found.append(f'<text x="{x}" y="{y:.0f}" text-anchor="middle" {turn}>{names[0]}</text>')
    return found


def _captions(layout: Layout, shown: list[int]) -> list[str]:
    """Explains the picture, the title first."""
    shape = ", ".join(map(str, layout.shape))
    said = [f"[{shape}] on {layout.mesh}"]
    for axis, (name, state) in enumerate(zip(layout.mesh.names, layout.states)):
        count = layout.mesh.sizes[axis]
        if state.kind == "P":
            said.append(f"{name}: hatched, each of {count} ranks holds a summand of every element")
        elif state.is_replicated:
            said.append(f"{name}: the same on all {count} ranks")
        elif state.is_sharded:
            said.append(f"{name}: dim {state.dim} is cut, {state.placement!r} over {count} ranks")
        else:
            said.append(f"{name}: what the other axes leave is flattened and cut over {count} ranks")
    hidden = [str(dim) for dim in range(len(layout.shape)) if dim not in shown]
    if hidden:
        said.append(f"not drawn: dim {', '.join(hidden)}; where it is cut, parts lie behind each other")
    return said


def _wrapped(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > _MOST_CHARACTERS:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _listed(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0, 2`; many by how many they are."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks: {ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
