"""A step's timeline as one page: lanes per rank, what was exposed, who came last; zoom, and a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .spans import Span, Spans, exposed, ideal, lost, straggler
from .style import COLOURS, LEGEND, legend

MEANING = {
    "forward": "forward", "backward": "backward", "optimizer": "optimizer's step",
    "collective": "collective, work beside it", "exposed": "collective, nothing beside it",
    "I": "input gradient", "W": "weight gradient",
}  # fmt: skip
DEEPEST = 4
"""Modules further inside are left to the trace for Chrome."""
_LEAST = 1e-4
"""Of the whole width; what is narrower is drawn as wide."""


def timeline_page(ranks: Spans) -> str:
    """The page. `ranks`: by rank, its spans as `read_timeline` gives them."""
    begin = min((one["start"] for spans in ranks.values() for one in spans), default=0.0)
    end = max((one["end"] for spans in ranks.values() for one in spans), default=begin + 1.0)
    simulated = ideal(ranks)
    first = min((one["start"] for rank in simulated for one in ranks[rank] if one["lane"] == "pipeline"), default=begin)
    lanes = []
    for rank in sorted(ranks):
        compute = [one for one in ranks[rank] if one["lane"] == "compute"]
        rows = [*_rows(ranks[rank], compute)]
        rows.append(("simulated", [{**one, "start": one["start"] + first, "end": one["end"] + first}
                                   for one in simulated.get(rank, ())]))  # fmt: skip
        lanes.append(f"<h2>rank {rank}</h2>")
        for name, spans in rows:
            if spans:
                bars = "".join(_bar(one, compute, begin, end - begin) for one in spans)
                lanes.append(f'<div class="lane"><b>{escape(name)}</b><div class="bars">{bars}</div></div>')
    text = "\n".join(lanes)
    meant = [(COLOURS[kind], said) for kind, said in MEANING.items() if f"background:{COLOURS[kind]}" in text]
    said = straggler(ranks)
    return _PAGE.format(
        seconds=f"{1e3 * (end - begin):.2f} ms, {len(ranks)} ranks",
        straggler=f"<p><strong>{escape(said)}.</strong></p>" if said else "",
        simulated=_SIMULATED if any(simulated.values()) else "",
        table=_table(ranks), legend=legend(meant), lanes=text, style=LEGEND,
    )  # fmt: skip


def _rows(spans: Sequence[Span], compute: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    for depth in range(DEEPEST):
        yield "compute" if not depth else "", [one for one in compute if one["about"].get("depth", 0) == depth]
    yield "collectives", [one for one in spans if one["lane"] == "collectives"]
    yield "pipeline", [one for one in spans if one["lane"] == "pipeline"]


def _bar(one: Span, compute: Sequence[Span], begin: float, length: float) -> str:
    about, took = one["about"], one["end"] - one["start"]
    said = [one["name"], f"{1e3 * took:.3f} ms"]
    kind = about.get("phase") or about.get("kind") or "other"
    if one["lane"] == "collectives":
        bare = exposed(one, compute)
        kind = "exposed" if 2 * bare > took else "collective"
        said += [f"{1e3 * bare:.3f} ms of it exposed", f"{about.get('received', 0):,} bytes received"]
        said += [
            f"{key}: {about[key]}" for key in ("axes", "function", "module", "line", "direction") if about.get(key)
        ]
    left, width = (one["start"] - begin) / length, max(_LEAST, took / length)
    colour = COLOURS.get(kind, COLOURS["other"])
    return (
        f'<i style="left:{100 * left:.4f}%;width:{100 * width:.4f}%;background:{colour}" '
        f'title="{escape(chr(10).join(said))}">{escape(one["name"])}</i>'
    )


def _table(ranks: Spans) -> str:
    head = ("rank", "in collectives", "exposed", "waiting for the last rank", "came last")
    rows = []
    for rank, one in sorted(lost(ranks).items()):
        times = (one.communicating, one.exposed, one.waiting)
        rows.append((str(rank), *(f"{1e3 * value:.2f} ms" for value in times), f"{one.last} of {one.met}"))
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{body}</table>"


_SIMULATED = (
    "<p>Under the measured actions of a pipeline lie the same actions, simulated: in the schedule's order, each stage "
    "at the median of its times, transfers free. What the measured ones are later by was lost in waiting.</p>"
)
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Timeline of a step</title>
<style>
:root {{ --zoom: 1 }}
body {{ font: 14px sans-serif; margin: 1.5em; color: #222 }}
h2 {{ font-size: 14px; margin: 1em 0 2px }}
td, th {{ padding: 2px 14px 2px 0; text-align: right }}
{style}.tools {{ margin: 1em 0 }} .tools label {{ margin-right: 2em }}
#lanes {{ overflow-x: auto }}
.lane {{ position: relative; width: calc(100% * var(--zoom)); height: 18px }}
.lane b {{ position: sticky; left: 0; float: left; width: 84px; font: 11px sans-serif; line-height: 18px; z-index: 1;
  background: #fffd }}
.bars {{ position: absolute; left: 84px; right: 0; top: 0; bottom: 0 }}
.bars i {{ position: absolute; top: 1px; bottom: 1px; overflow: hidden; font: 10px sans-serif; line-height: 16px;
  color: #fff; white-space: nowrap; box-sizing: border-box; border-left: 1px solid #fff8 }}
.searching .bars i {{ opacity: .15 }} .searching .bars i.found {{ opacity: 1; outline: 2px solid #222 }}
</style>
<h1>Timeline of a step</h1>
<p>{seconds}. Times are the host's. Point at a bar for what it is, how long it took, and why it was sent.</p>
{straggler}{simulated}
{table}
<p>Collectives that are under way at once count each. Exposed is what no module ran beside, from its begin to its end.
</p>
{legend}
<p class="tools"><label>zoom <input id="zoom" type="range" min="0" max="8" step="0.1" value="0"></label>
<label>search <input id="search" placeholder="module, collective, line"></label> <span id="count"></span></p>
<div id="lanes">
{lanes}
</div>
<script>
const root = document.documentElement, bars = [...document.querySelectorAll(".bars i")];
document.getElementById("zoom").oninput = e => root.style.setProperty("--zoom", 2 ** e.target.value);
document.getElementById("search").oninput = e => {{
  const text = e.target.value.toLowerCase(); let found = 0;
  for (const bar of bars) {{
    const hit = text !== "" && bar.title.toLowerCase().includes(text);
    bar.classList.toggle("found", hit); found += hit;
  }}
  document.body.classList.toggle("searching", text !== "");
  document.getElementById("count").textContent = text ? found + " found" : "";
}};
</script>
</html>
"""
