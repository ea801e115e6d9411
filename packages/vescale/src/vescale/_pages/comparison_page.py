"""Two runs compared, as a page: what differs first, how it grows by step, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import floor, isfinite, log10

from vescale_pipeline.draw import COLOURS as ACTIONS

from .._recorded.difference import Difference

_COLOURS = {"forward": ACTIONS["F"], "backward": ACTIONS["B"], "update": ACTIONS["REDUCE"]}
"""The colours of a schedule's picture."""
_LEGEND = """
.legend span { margin-right: 1.4em; white-space: nowrap; display: inline-block }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 5px }
"""
_COLUMNS = ("step", "direction", "module", "tensor", "call", "why", "norm a", "norm b", "digest a", "digest b")
_WIDE, _HIGH, _LEFT, _TOP = 900, 260, 70, 14
_FINEST = 1e-9
"""Distances below it (other bits of equal sketches) are drawn here."""


def comparison_page(report: str, differences: Sequence[Difference], most: int) -> str:
    """The page, with the report and the first `most` differences."""
    shown = differences[:most]
    more = len(differences) - len(shown)
    left_out = f"<p>{more} differences more are not shown.</p>" if more else ""
    return _PAGE.format(report=escape(report), chart=_chart(differences), table=_table(shown) + left_out, style=_LEGEND)


def _chart(differences: Sequence[Difference]) -> str:
    """The largest distance of each step and direction, over the steps, both on their scales."""
    largest: dict[str, dict[int, float]] = {}
    for one in differences:
        if isfinite(one.distance):
            row = largest.setdefault(one.direction, {})
            row[one.step] = max(row.get(one.step, _FINEST), one.distance)
    if not largest:
        return ""
    values = [value for row in largest.values() for value in row.values()]
    steps = sorted({step for row in largest.values() for step in row})
    low, high = floor(log10(min(values))), max(0, floor(log10(max(values))) + 1)
    width, height = _WIDE - _LEFT - 20, _HIGH - _TOP - 50

    def x(step: int) -> float:
        return _LEFT + width * ((step - steps[0]) / (steps[-1] - steps[0]) if len(steps) > 1 else 0.5)

    def y(value: float) -> float:
        return _TOP + height * (high - log10(value)) / (high - low)

    made = []
    for power in range(low, high + 1, max(1, (high - low) // 6)):
        at = y(10.0**power)
        made.append(f'<line x1="{_LEFT}" x2="{_WIDE - 20}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        made.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    for step in steps[:: max(1, len(steps) // 12)]:
        made.append(f'<text x="{x(step):.1f}" y="{_TOP + height + 18}" text-anchor="middle">{step}</text>')
    made.append(f'<text x="{_LEFT + width / 2}" y="{_TOP + height + 38}" text-anchor="middle">step</text>')
    for direction, row in largest.items():
        colour = _COLOURS[direction]
        points = " ".join(f"{x(step):.1f},{y(row[step]):.1f}" for step in sorted(row))
        made.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        made += [
            f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour}">'
            f"<title>step {step}, {direction}: {value:.2g}</title></circle>"
            for step, value in row.items()
        ]
    return (
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" role="img">{"".join(made)}</svg>\n'
        f"{_legend(largest)}\n"
        "<p>The largest distance of a step, relative to the norm. A line that begins low and climbs is rounding that "
        "grows; one that begins high is a bug at its first point.</p>"
    )


def _legend(names: Iterable[str]) -> str:
    keys = "".join(f'<span><i style="background:{_COLOURS[name]}"></i>{escape(name)}</span>' for name in names)
    return f'<p class="legend">{keys}</p>'


def _table(differences: Sequence[Difference]) -> str:
    """The first difference of each direction in the first step; what follows from them is folded."""
    if not differences:
        return ""
    groups: dict[str, list[Difference]] = {}
    for one in differences:
        when = one.direction if one.step == differences[0].step else "later steps"
        groups.setdefault(when, []).append(one)
    later = groups.pop("later steps", [])
    shown = [_rows(first for first, *_ in groups.values())]
    folded = {f"{len(rest)} more, {direction}": rest for direction, (_, *rest) in groups.items()}
    folded[f"{len(later)} more in later steps"] = later
    shown += [f"<details><summary>{said}</summary>{_rows(rest)}</details>" for said, rest in folded.items() if rest]
    return "\n".join(shown)


def _rows(differences: Iterable[Difference]) -> str:
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "\n".join(map(_row, differences))
    return f'<div class="wide"><table><tr>{head}</tr>\n{rows}</table></div>'


def _row(difference: Difference) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(difference))}</tr>"


def _cells(difference: Difference) -> Iterator[str]:
    direction, module, call, tensor = difference.place
    yield from (str(difference.step), direction, module or "(root)", tensor, str(call), difference.why)
    yield from (f"{entry['norm']:.6g}" for entry in (difference.a, difference.b))
    yield from (entry["digest"] for entry in (difference.a, difference.b))


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Two runs compared</title>
<style>
body {{ font: 14px sans-serif; margin: 1.5em; color: #222 }}
pre {{ overflow-x: auto }} svg {{ max-width: 900px; font: 12px sans-serif }}
td, th {{ padding: 2px 14px 2px 0; text-align: left; white-space: nowrap }}
summary {{ margin: 2px 0 10px; cursor: pointer }}
.wide {{ overflow-x: auto }}
{style}</style>
<h1>Two runs compared</h1>
<pre>{report}</pre>
{chart}
{table}
</html>
"""
