"""The explanation of a plan as one page: plain SVG, no script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from math import floor, log10

from .pricing.hardware import GIB
from .weighed import Weighed

TIME = {
    "compute": "#1f4e79", "elementwise": "#4f81bd", "tensor": "#9dc3e6", "experts": "#2e8b8b", "data": "#7fc8c8",
    "context": "#56b4d3", "pipeline": "#8a8fbf", "optimizer": "#b9bcdc",
}  # fmt: skip
MEMORY = {
    "parameters": "#7f3b08", "gradients": "#c8601a", "states": "#f0a04b", "activations": "#f6cf8e",
    "gathered": "#a68a64",
}  # fmt: skip
RANKS = ("#4d4d4d", "#7a7a7a", "#a3a3a3", "#c9c9c9")
FITS, BEYOND, FRONT, CHOSEN = "#5a9e6f", "#d9d9d9", "#8d76b0", "#c2185b"
"""Blues are seconds, browns are bytes, greys are ranks: one colour means one thing on the whole page."""
NEAR = 2.0
"""A limit that is more times as far as the longest bar is named beside the bars: drawn to its scale they vanish."""
WIDE, ROW, LEFT = 960, 26, 390
GRID, LIMIT = 'stroke="#eee"', 'stroke="#000" stroke-dasharray="4 3"'
SHOWN = {"stages": 8, "replicas": 4, "tp": 8}


def page(weighed: Weighed, tables: str) -> str:
    """The whole page, with the tables that a console shows."""
    best = weighed.ranked
    labels = [f"{at + 1}  {one.candidate}" for at, one in enumerate(best)]
    memory = [{name: size / GIB for name, size in asdict(one.memory).items()} for one in best]
    seconds = [asdict(one.cost) for one in best]
    head = "\n".join(escape(line) for line in weighed.headline())
    parts = [
        ("The mesh", mesh(weighed), "A column computes other layers, a row other samples; a row's cells share both."),
        (
            "Memory of the fullest rank",
            bars(labels, memory, MEMORY, "GiB", limit=weighed.request.limit / GIB),
            f"The choice first, then the next best. Most of the choice's memory is {_most(memory[0])}.",
        ),
        (
            "One step",
            bars(labels, seconds, TIME, "seconds"),
            f"In the same order. Most of the choice's time is {_most(seconds[0])}.",
        ),
        (
            "Time against memory: every candidate, and the front that no other beats",
            front(weighed),
            f"{sum(one.fits for one in weighed.priced):,} of {len(weighed.priced):,} candidates fit. Down is less "
            "memory, left is less time: what lies above and right of the front is beaten in both.",
        ),
        ("Tables", f"<pre>{escape(tables)}</pre>", ""),
    ]
    body = "\n".join(
        f"<h2>{title}</h2>\n<figure>{content}<figcaption>{escape(said)}</figcaption></figure>"
        for title, content, said in parts
    )
    return _PAGE.format(head=head, body=body)


def _most(parts: Mapping[str, float]) -> str:
    """The largest part, and its share."""
    name = max(parts, key=lambda name: parts[name])
    return f"{name}, {parts[name] / (sum(parts.values()) or 1.0):.0%}"


def bars(
    labels: Sequence[str],
    rows: Sequence[dict[str, float]],
    colours: Mapping[str, str],
    unit: str,
    *,
    limit: float | None = None,
) -> str:
    """Stacked bars, a row per label, over a scale in `unit`, with a legend. `limit` is a line where it is near, and
    said where it is not."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    longest = max(sum(row.values()) for row in rows) or 1.0
    near = limit is not None and limit <= NEAR * longest
    most = max(longest, limit if near else 0.0)
    scale = (WIDE - LEFT - 90) / most
    made = []
    for number, (label, row) in enumerate(zip(labels, rows)):
        top, left = ROW * number, float(LEFT)
        made.append(_text(LEFT - 8, top + 17, label, anchor="end"))
        for name in names:
            width = row[name] * scale
            tip = f"{name} {row[name]:.4g} {unit}"
            made.append(_box(left, top + 4, width, ROW - 8, colours[name], tip))
            left += width
        made.append(_text(left + 6, top + 17, f"{sum(row.values()):.4g}"))
    high = ROW * len(rows)
    for tick in _round(most):
        at = LEFT + tick * scale
        made.append(f'<path d="M{at:.1f} {high} v5" stroke="#666"/>')
        made.append(_text(at, high + 17, f"{tick:g}", anchor="middle"))
    said = unit
    if limit and near:
        at = LEFT + limit * scale
        made.append(_line(at, 0, at, high, LIMIT))
        said += f"; the dashed line is the limit, {limit:.4g}"
    elif limit:
        said += f"; the limit is {limit:.4g}, {limit / longest:.3g} times the longest bar, and not drawn"
    made.append(_text(LEFT, high + 34, said))
    return _svg(high + 40, made) + _legend({name: colours[name] for name in names})


def _round(most: float) -> list[float]:
    """Some four round numbers from 0 to `most`."""
    step = 10.0 ** floor(log10(most / 4))
    step *= next(m for m in (1, 2, 5, 10) if m * step * 4 >= most * 0.8)
    return [at * step for at in range(int(most / step) + 1)]


def front(weighed: Weighed) -> str:
    """A point per candidate, time against memory, both logarithmic, those that would lie on each other once; the front
    as a line, the choice as a ring."""
    points = [one for one in weighed.priced if one.seconds > 0 and one.bytes > 0]
    if not points:
        return ""
    high, chosen = 380, weighed.chosen
    xs = [log10(one.seconds) for one in points] + [log10(max(1e-12, chosen.cost.total))]
    ys = [log10(one.bytes / GIB) for one in points] + [log10(max(1e-12, chosen.memory.total / GIB))]
    across, up = _scale(xs, 70, WIDE - 30), _scale(ys, high - 40, 20)
    made = []
    for tick in _ticks(xs):
        at = across(log10(tick))
        made += [_text(at, high - 18, f"{tick:g} s", anchor="middle"), _line(at, 20, at, high - 34, GRID)]
    for tick in _ticks(ys):
        at = up(log10(tick))
        made += [_text(62, at + 4, f"{tick:g} GiB", anchor="end"), _line(70, at, WIDE - 30, at, GRID)]
    places = {(round(across(log10(one.seconds))), round(up(log10(one.bytes / GIB))), one.fits): one for one in points}
    for one in places.values():
        tip = f"{one.candidate}: {one.seconds:.4g} s, {one.bytes / GIB:.3g} GiB"
        drawn = f'r="3" fill="{FITS if one.fits else BEYOND}"'
        made.append(_circle(across(log10(one.seconds)), up(log10(one.bytes / GIB)), drawn, tip))
    line = " ".join(f"{across(log10(p.seconds)):.1f},{up(log10(p.bytes / GIB)):.1f}" for p in weighed.front)
    made.append(f'<polyline points="{line}" fill="none" stroke="{FRONT}" stroke-width="1.5"/>')
    limit = log10(weighed.request.limit / GIB) if weighed.request.limit > 0 else None
    if limit is not None and min(ys) <= limit <= max(ys):
        made.append(_line(70, up(limit), WIDE - 30, up(limit), LIMIT))
        made.append(_text(WIDE - 32, up(limit) - 5, "limit", anchor="end"))
    ring = f'r="7" fill="none" stroke="{CHOSEN}" stroke-width="2.5"'
    made.append(_circle(across(xs[-1]), up(ys[-1]), ring, "chosen"))
    made.append(_text(WIDE - 30, high - 2, "seconds of a step, logarithmic", anchor="end"))
    made.append(_text(4, 12, "GiB of the fullest rank, logarithmic"))
    return _svg(high, made) + _legend({"fits": FITS, "does not fit": BEYOND, "front": FRONT, "chosen": CHOSEN})


def mesh(weighed: Weighed) -> str:
    """Ranks of the pipeline from left to right, replicas below each other, ranks of the tensor axis as cells."""
    one = weighed.chosen.candidate
    names = weighed.request.structure.block_names
    starts = [names.index(cut) for cut in weighed.chosen.cuts]
    bounds = [0, *starts, len(names)]
    every = {"stages": one.pp, "replicas": one.replicas, "tp": one.tp}
    stages, replicas, ranks = (min(number, SHOWN[name]) for name, number in every.items())
    wide, high = min(220.0, (WIDE - 40) / stages), 34.0
    made = []
    for stage in range(stages):
        left = 20 + stage * wide
        own = range(stage, one.pp * one.virtual, one.pp)
        held = sum(bounds[at + 1] - bounds[at] for at in own) if names else 0
        title = f"stage{'s' * (len(own) > 1)} {', '.join(map(str, own))}" if one.pp > 1 else "every rank"
        made.append(_text(left, 16, title, bold=True))
        made.append(_text(left, 32, f"{held} blocks" if names else ""))
        for replica in range(replicas):
            top = 42 + replica * (high + 8)
            made.append(
                f'<rect x="{left:.1f}" y="{top}" width="{wide - 14:.1f}" height="{high}" rx="4" class="group"/>'
            )
            cell = (wide - 22) / ranks
            for rank in range(ranks):
                number = (stage * one.replicas + replica) * one.tp + rank
                row, part = divmod(replica, one.cp)
                context = f", cp {part}" * (one.cp > 1)
                tip = f"rank {number}: pp {stage}, dp {row}{context}, tp {rank}"
                colour = RANKS[(replica % one.ep if one.ep > 1 else replica) % 4]
                made.append(_box(left + 4 + rank * cell, top + 5, cell - 3, high - 10, colour, tip))
    more = [f"{name}: {all_} in all, {SHOWN[name]} drawn" for name, all_ in every.items() if SHOWN[name] < all_]
    context = f" x cp {one.cp}" * (one.cp > 1)
    sizes = f"pp {one.pp} x dp {one.dp}{context} x tp {one.tp} = {one.ranks} ranks"
    if one.ep > 1:
        sizes += f"; experts over {one.ep} neighbours of dp, one colour each"
    made.append(_text(20, 60 + replicas * (high + 8), "; ".join([sizes, *more])))
    return _svg(72 + replicas * (high + 8), made)


def _scale(values: Sequence[float], first: float, last: float):
    low, high = min(values), max(values)
    room = (high - low) * 0.04 or 0.5
    return lambda value: first + (value - low + room) / (high - low + 2 * room) * (last - first)


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers within 10 ** values."""
    low, high = 10 ** min(values), 10 ** max(values)
    ticks = [m * 10.0**e for e in range(int(min(values)) - 2, int(max(values)) + 2) for m in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    return inside[:: max(1, len(inside) // 8)] or [float(f"{low:.3g}")]


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _box(x: float, y: float, wide: float, high: float, colour: str, tip: str) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, wide):.1f}" height="{high:.1f}"'
    return f'<rect {size} fill="{colour}"><title>{escape(tip)}</title></rect>'


def _circle(x: float, y: float, drawn: str, tip: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" {drawn}><title>{escape(tip)}</title></circle>'


def _line(x: float, y: float, to_x: float, to_y: float, drawn: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" {drawn}/>'


def _svg(high: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDE} {high:.0f}" width="{WIDE}" role="img">\n' + "\n".join(parts) + "\n</svg>\n"


def _legend(colours: Mapping[str, str]) -> str:
    keys = [f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items()]
    return f'<p class="legend">{" ".join(keys)}</p>'


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>vescale plan</title>
<style>
body {{ font: 14px sans-serif; margin: 2em; max-width: 1000px }} svg {{ font: 12px sans-serif; max-width: 100% }}
svg text {{ paint-order: stroke; stroke: #fff; stroke-width: 3px }}
.group {{ fill: #f4f4f4; stroke: #999 }} .legend span {{ margin-right: 1.2em; white-space: nowrap }}
figure {{ margin: 0 }} figcaption {{ color: #444; max-width: 60em }}
.legend i {{ display: inline-block; width: 12px; height: 12px; margin-right: 5px }}
pre {{ font-size: 12px; overflow-x: auto }}
</style>
<h1>A plan, and why</h1>
<pre>{head}</pre>
{body}
</html>
"""
