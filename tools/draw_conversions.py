"""Draws a picture of each conversion between layouts, from the table in docs/design.md: docs/conversions/*.svg.

    python tools/draw_conversions.py            # writes them
    python tools/draw_conversions.py --check    # status 1 if one is not what the table says

A picture is of one axis of three ranks and a tensor of three rows. Above, the value goes from left to right; below, its
gradient goes from right to left, between the states that the calculus gives for it. A full row is a value, a hatched
one a part of a sum that is still partial, an empty one is not on this rank.
"""

import argparse
import re
import sys
from pathlib import Path

TOP = Path(__file__).absolute().parents[1]
DESIGN, FOLDER = TOP / "docs/design.md", TOP / "docs/conversions"
RANKS = 3
GRADIENT = {"S": "S", "S(a)": "S(a)", "S(b)": "S(b)", "P": "R", "I": "I", "R": "P"}
COLOURS = ("#3459b5", "#1b7f4d", "#c2701c")
CELL, GAP, LEFT, WIDTH, HEIGHT = 22, 30, 96, 640, 300
ROW = re.compile(r"^\| (?P<states>[^|]+ -> [^|]+) \| (?P<forward>[^|]+) \| (?P<backward>[^|]+) \|$", re.MULTILINE)


def conversions(design: str) -> list[tuple[str, str, str, str]]:
    """(from, to, what the forward does, what the backward does) of every row; a row may name several."""
    found = []
    table = design[design.index("| conversion | forward | backward |") :].split("\n\n")[0]
    for row in ROW.finditer(table):
        pairs = [pair.strip().split(" -> ") for pair in row["states"].split(",")]
        backward = [part.strip() for part in row["backward"].split(", resp. ")]
        for i, (before, after) in enumerate(pairs):
            forward, back = row["forward"].strip(), backward[min(i, len(backward) - 1)]
            found.append((before, after, forward, forward if "same mask" in back else back))
    return found


def name_of(before: str, after: str) -> str:
    return f"{before}-to-{after}".replace("(", "").replace(")", "")


def picture(before: str, after: str, forward: str, backward: str) -> str:
    """The SVG of one conversion."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{before} to {after}">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<defs><pattern id="partial" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="white"/>'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="#444" stroke-width="3"/></pattern>'
        '<marker id="tip" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#222"/></marker></defs>',
    ]
    for line, (title, left, right, words, backwards) in enumerate((
        ("value", before, after, forward, False),
        ("gradient", GRADIENT[before], GRADIENT[after], backward, True),
    )):  # fmt: skip
        y = 40 + 140 * line
        parts.append(f'<text x="12" y="{y + 36}" fill="#555">{title}</text>')
        parts += _side(left, LEFT, y)
        parts += _side(right, LEFT + 340, y)
        ends = (LEFT + 325, LEFT + 205) if backwards else (LEFT + 205, LEFT + 325)
        arrow = 'stroke="#222" stroke-width="1.6" marker-end="url(#tip)"'
        parts.append(f'<line x1="{ends[0]}" y1="{y + 33}" x2="{ends[1]}" y2="{y + 33}" {arrow}/>')
        for i, part in enumerate(_wrapped(words)):
            where = y + 24 if i == 0 else y + 36 + 14 * i
            parts.append(f'<text x="{LEFT + 265}" y="{where}" text-anchor="middle" font-size="11">{part}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _side(state: str, x: float, y: float) -> list[str]:
    """The three ranks in one state: rows of a column, or columns of a row for S(b)."""
    parts = [f'<text x="{x}" y="{y - 10}" font-weight="bold">{state}</text>']
    for rank in range(RANKS):
        at = x + rank * (2 * CELL + GAP / 2)
        parts.append(f'<text x="{at + CELL}" y="{y + 3 * CELL + 15}" text-anchor="middle" font-size="10" '
                     f'fill="#555">rank {rank}</text>')  # fmt: skip
        for part in range(RANKS):
            here = not state.startswith("S") or part == rank
            fill = "none" if not here else "url(#partial)" if state == "P" else COLOURS[part]
            if state == "S(b)":
                box = (at + part * 2 * CELL / 3, y, 2 * CELL / 3, 3 * CELL)
                fill = "#7a4fb5" if here else "none"
            else:
                box = (at, y + part * CELL, 2 * CELL, CELL)
            left, top, width, height = (round(value, 1) for value in box)
            size = f'width="{width}" height="{height}"'
            parts.append(f'<rect x="{left}" y="{top}" {size} fill="{fill}" stroke="#888"/>')
    return parts


def _wrapped(words: str, most: int = 22) -> list[str]:
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + len(word) >= most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a picture is out of date")
    check = parser.parse_args().check
    drawn = {f"{name_of(*row[:2])}.svg": picture(*row) for row in conversions(DESIGN.read_text())}
    if check:
        there = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
        wrong = sorted(name for name in {*drawn, *there} if drawn.get(name) != there.get(name))
        print(f"conversions: {', '.join(wrong)} not up to date" if wrong else f"conversions: {len(drawn)} up to date")
        return int(bool(wrong))
    FOLDER.mkdir(exist_ok=True)
    for name, text in drawn.items():
        (FOLDER / name).write_text(text)
    print(f"conversions: {len(drawn)} written to {FOLDER.relative_to(TOP)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
