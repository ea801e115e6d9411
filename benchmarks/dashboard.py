"""The dashboard: ASV's own pages, and a front page with the headlines, as a folder any web server can serve.

    make dashboard                          writes benchmarks/.asv/site, whose index.html is the front page
    python benchmarks/dashboard.py --config other/asv.conf.json --results other/results

The front page shows each headline beside its budget with a sparkline over the commits, what regressed and at which
commit, every other figure, and the newest verdict of each "What it must show" check that results/ holds; of what
`benchmarks/peers.py` measured the times, tokens per second and memory of each contender beside the ratios, and of
`make gpu` how many cases hold on which device. Over a point stand its commit's first line and value. It is one HTML
file without scripts.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from html import escape
from importlib import metadata
from pathlib import Path

from figures import Figure, read_config, read_figures, read_machines
from gate import unmeasured, verdict
from history import CONFIG, asv, subject

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --dim: #667085; --line: #d9dee7; --card: #f7f8fa; --bad: #c62828;
        --good: #1b7f4d; --curve: #3459b5; --page: #ffffff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --dim: #98a2b3; --line: #343b48; --card: #1b2029;
        --bad: #ff6b63; --good: #5fd39a; --curve: #8fb0ff; --page: #12161d } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
       max-width: 76rem; padding: 0 1.5rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem } .dim { color: var(--dim) }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: .9rem }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem }
.card.bad { border-color: var(--bad) } .value { font-size: 1.7rem; font-weight: 600 }
.bad .value, .badtext { color: var(--bad) } .goodtext { color: var(--good) }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .8rem .3rem 0;
        border-bottom: 1px solid var(--line); vertical-align: middle } td.number { font-variant-numeric: tabular-nums }
svg { display: block; overflow: visible } code { font-size: .9em; overflow-wrap: anywhere }
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="another suite's asv.conf.json")
    parser.add_argument(
        "--results", type=Path, default=CONFIG.parents[1] / "results", help="folder of make verify's JSON"
    )
    arguments = parser.parse_args()
    config = arguments.config.absolute()
    figures = read_figures(config)
    if not figures:
        print("dashboard: nothing was measured yet; run make bench-history first", file=sys.stderr)
        return 2
    settings = read_config(config)
    published = subprocess.run(asv(config, "publish"), cwd=config.parent, capture_output=True, text=True)
    if published.returncode:
        print(published.stdout + published.stderr, file=sys.stderr)
        return 1
    page = Path(settings.html_dir).parent / "index.html"
    page.write_text(front_page(config, figures, read_verdicts(arguments.results), read_devices(arguments.results)))
    print(f"dashboard: {page}")
    return 0


def front_page(config: Path, figures: list[Figure], verdicts: list[dict], devices: list[dict]) -> str:
    headlines = [each for each in figures if each.headline]
    others = [each for each in figures if not each.headline]
    commits = {point.commit for each in figures for point in each.points}
    failing = [each for each in headlines if verdict(each)]
    state = (
        f'<span class="badtext">{len(failing)} of {len(headlines)} headlines fail</span>'
        if failing
        else f'<span class="goodtext">all {len(headlines)} headlines hold</span>'
    )
    sections = [
        f"<h1>veScale benchmarks</h1><p>{state}{unmeasured(config, figures)}. "
        f"{len(commits)} commits, lower is better but for tokens per second. "
        f'<a href="asv/index.html">All graphs (ASV)</a> '
        f'<span class="dim">written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</span></p>'
        f'<p class="dim">{escape("; ".join(read_machines(config)))}; Python {platform.python_version()}, '
        f"torch {metadata.version('torch')}</p>",
        '<h2>Headlines</h2><div class="cards">' + "".join(card(each) for each in headlines) + "</div>",
        steps(figures, read_config(config).repo),
        table(
            "Beside torch's own parallelism, two ranks of gloo",
            (
                "case",
                "",
                "wall time over theirs",
                "CPU time over theirs",
                "milliseconds",
                "tokens per second",
                "memory over theirs",
                "peak per rank",
                "commit",
            ),
            peer_rows(verdicts),
        ),
        table("On devices (make gpu)", ("part", "cases that hold", "device", "commit", "date"), device_rows(devices)),
        table("Every other figure", ("figure", "newest", "over commits", "machine"), map(row, others)),
        table("What was shown", ("point", "check", "holds", "figures", "commit", "with"), map(verdict_row, verdicts)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>veScale benchmarks</title>'
        '<link rel="icon" href="data:,"><meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def card(figure: Figure) -> str:
    words = verdict(figure)
    budget = "" if figure.headline.budget is None else f" of {figure.headline.budget:.2f}"
    return (
        f'<div class="card{" bad" if words else ""}"><div class="dim">{escape(figure.title)}</div>'
        f'<span class="value">{figure.latest.value:.3f}</span><span class="dim">{budget}</span>{sparkline(figure)}'
        f'<div class="{"badtext" if words else "dim"}">{escape(words or figure.machine)}</div></div>'
    )


def steps(figures: Iterable[Figure], repository: str) -> str:
    """The commits at which anything stepped up."""
    rows = []
    for figure in figures:
        for i in figure.regressions:
            point, before = figure.points[i], figure.points[i - 1]
            what = f"{before.value:.3f} to {point.value:.3f}"
            commit = escape(subject(repository, point.commit))
            rows.append((f'<code class="badtext">{commit}</code>', escape(figure.title), what))
    return table("Regressions", ("commit", "figure", "step"), rows) if rows else "<h2>Regressions</h2><p>None.</p>"


def row(figure: Figure) -> tuple[str, ...]:
    colour = ' class="badtext"' if figure.regressed else ""
    newest = f"<span{colour}>{figure.latest.value:.4g}</span>"
    return (escape(figure.title), newest, sparkline(figure, 160, 22), escape(figure.machine))


def table(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in each) + "</tr>" for each in rows)
    if not body:
        return ""
    head = "".join(f"<th>{name}</th>" for name in header)
    return f"<h2>{title}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def sparkline(figure: Figure, width: int = 220, height: int = 44) -> str:
    """The points from the oldest commit to the newest, the budget dashed, steps up as red dots."""
    values = [point.value for point in figure.points]
    budget = figure.headline.budget if figure.headline else None
    shown = [*values, *([budget] if budget is not None else [])]
    low, high = min(shown), max(shown)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)

    def place(i: int, value: float) -> tuple[float, float]:
        across = 4 + (width - 8) * (i / (len(values) - 1) if len(values) > 1 else 0.5)
        return round(across, 1), round(4 + (height - 8) * (high - value) / (high - low), 1)

    spots = [place(i, value) for i, value in enumerate(values)]
    line = " ".join(f"{x},{y}" for x, y in spots)
    level = place(0, budget)[1] if budget is not None else None
    limit = (
        f'<line x1="0" x2="{width}" y1="{level}" y2="{level}" stroke="var(--dim)" stroke-dasharray="4 3"/>'
        if level is not None
        else ""
    )
    dots = "".join(
        f'<circle cx="{x}" cy="{y}" r="{3 if i in figure.regressions else 2}" '
        f'fill="var(--{"bad" if i in figure.regressions else "curve"})">'
        f"<title>{figure.points[i].commit[:10]} {escape(figure.points[i].subject)}: {values[i]:.4g}</title></circle>"
        for i, (x, y) in enumerate(spots)
    )
    curve = f'<polyline points="{line}" fill="none" stroke="var(--curve)" stroke-width="1.5"/>'
    return f'<svg width="{width}" height="{height}" role="img">{limit}{curve}{dots}</svg>'


def read_verdicts(folder: Path) -> list[dict]:
    """The newest verdict of each check, as `make verify` wrote it."""
    newest: dict[tuple[str, str], dict] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        for check in record.get("checks", ()):
            if "title" in check:  # others keep figures under this name, too
                newest[check["point"], check["title"]] = {**record, **check}
    return [newest[key] for key in sorted(newest, key=lambda key: [float(key[0].partition(".")[0]), *key])]


def peer_rows(verdicts: Iterable[dict]) -> Iterator[tuple[str, ...]]:
    """Of the newest run of peers.py each contender of each case."""
    for check in verdicts:
        if "benchmarks/peers.py" in check.get("command", "") and isinstance(check["figures"], dict):
            for case, contenders in check["figures"].items():
                for name, told in contenders.items():
                    cells = (str(told.get(key, "")) for key in ("wall", "CPU", "ms", "tokens per second", "memory"))
                    peak = f"{told['peak bytes per rank']:,} bytes" if "peak bytes per rank" in told else ""
                    yield (escape(case), escape(name), *cells, peak, f"<code>{check['commit'][:10]}</code>")


def read_devices(folder: Path) -> list[dict]:
    """What `make gpu` wrote: the newest record of each device."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return list({one["device"]: one for one in records if "device" in one and "parts" in one}.values())


def device_rows(records: Iterable[dict]) -> Iterator[tuple[str, ...]]:
    for record in records:
        for part, found in record["parts"].items():
            held = list(_verdicts_in(found))
            shown = f"{sum(held)} of {len(held)}"
            shown = shown if all(held) else f'<span class="badtext">{shown}</span>'
            of = (escape(record["device"]), f"<code>{escape(record['commit'].partition(';')[0])}</code>")
            yield (escape(part), shown, *of, escape(record["date"][:10]))


def _verdicts_in(found: object) -> Iterator[bool]:
    """What each case in a part's nested dicts and lists says of itself."""
    if isinstance(found, dict) and isinstance(found.get("holds"), bool):
        yield found["holds"]
    elif isinstance(found, (dict, list)):
        for inner in found.values() if isinstance(found, dict) else found:
            yield from _verdicts_in(inner)


def verdict_row(check: dict) -> tuple[str, ...]:
    holds = '<span class="goodtext">yes</span>' if check["holds"] else '<span class="badtext">no</span>'
    figures = "" if check["figures"] is None else f"<code>{escape(json.dumps(check['figures']))[:600]}</code>"
    place = f"torch {escape(check['torch'])}, {escape(str(check.get('device', check['machine'])))}"
    return (check["point"], escape(check["title"]), holds, figures, f"<code>{check['commit'][:10]}</code>", place)


if __name__ == "__main__":
    sys.exit(main())
