"""draw: a timeline of a schedule, simulated or recorded, as PNG, SVG, or a trace for Chrome and Perfetto.

Needs matplotlib for pictures (`pip install "vescale-pipeline[draw]"`); a trace needs nothing.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ._errors import ScheduleError
from .action import COMPUTE, Action, Schedule
from .simulate import Event, Simulation, simulate

COLOURS = {"F": "#4C78A8", "B": "#59A14F", "I": "#8CD17D", "W": "#F28E2B", "transfer": "#B0B0B0", "REDUCE": "#B07AA1"}
LABELS = {
    "F": "F forward",
    "B": "B backward",
    "I": "I input gradient",
    "W": "W weight gradient",
    "transfer": "transfer",
    "REDUCE": "reduce",
}
MOST_LABELS = 3000
"""Beyond as many computations, microbatch numbers would be specks."""
_DARK = 0.45
"""Luminance below which digits are white."""


def draw(what: Schedule | Simulation | Iterable[Sequence[Any]], path: str | Path, *, title: str | None = None) -> Path:
    """Writes a timeline with a row per rank. The suffix of the path selects the format: .png, .svg, or .json for a
    trace.

    Arguments:
        what: a schedule, drawn as simulated at unit costs; a simulation; or recorded events (rank, action, start, end),
            with times in seconds.
        path: the file to write; replaced if it exists.
        title: above the picture; by default, a summary of the schedule.

    Raises ScheduleError for another suffix, and if a picture is requested and matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".json"):
        stem = path.parent / (path.stem or "picture")
        remedies = [(f"{stem}{suffix}", "") for suffix in (".png", ".svg", ".json")]
        raise ScheduleError("draw", f"{path.name!r} ends in none of .png, .svg, .json", (), remedies)
    if isinstance(what, Schedule):
        what = simulate(what)
    events = what.events if isinstance(what, Simulation) else _read(what)
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(events)))
        return path
    if title is None:
        title = _describe(what) if isinstance(what, Simulation) else f"{len(events)} recorded events"
    figure = _picture(events, title)
    if path.suffix == ".png":
        figure.savefig(path)
        return path
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    # As wide as the page that shows it: a size in points would be clipped at a window's border.
    path.write_text(
        re.sub(r"<svg [^>]*>", lambda tag: re.sub(r' (width|height)="[^"]*"', "", tag[0]), text.getvalue(), count=1)
    )
    return path


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """Returns the events as Chrome's trace JSON: a process per rank, with one thread that computes and one that
    transfers.

    One unit of time is shown as one second.
    """
    events = list(events)
    rows: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for lane, name in enumerate(("compute", "transfers")):
            rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}})
    for rank, action, start, end in events:
        rows.append(
            {
                "ph": "X",
                "name": str(action),
                "cat": _group(action),
                "pid": rank,
                "tid": int(_group(action) == "transfer"),
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
        )
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _read(recorded: Iterable[Sequence[Any]]) -> list[Event]:
    """Recorded events; their time begins with the first of them."""
    events = [Event(rank, Action(*action), start, end) for rank, action, start, end in recorded]
    begin = min((event.start for event in events), default=0.0)
    return [event._replace(start=event.start - begin, end=event.end - begin) for event in events]


def _group(action: Action) -> str:
    return action.kind if action.kind in COMPUTE or action.kind == "REDUCE" else "transfer"


def _describe(simulation: Simulation) -> str:
    schedule = simulation.schedule
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches, "
        f"{schedule.stages} stages   bubble {simulation.bubble:.1%} "
        f"(own windows {simulation.window_bubble:.1%})   peak memory {max(simulation.peak_memory):g}"
    )


def _picture(events: Sequence[Event], title: str) -> Any:
    """A figure; made without pyplot, so that neither a display nor global state is touched."""
    try:
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        remedies = [('pip install "vescale-pipeline[draw]"', ""), ("draw(..., 'timeline.json')", "a trace for Chrome")]
        raise ScheduleError("draw", "a picture needs matplotlib, which is not installed", (), remedies) from None
    ranks = max((event.rank for event in events), default=0) + 1
    events = [event for event in events if event.end > event.start]
    end = max((event.end for event in events), default=0.0) or 1.0
    figure = Figure(
        figsize=(min(24.0, 4 + 0.25 * len(events) / ranks), 1.6 + 0.45 * ranks), layout="constrained", dpi=150
    )
    axes = figure.add_subplot()
    for (rank, group, shade), bars in _bars(events).items():
        # A transfer is a thin bar under what the rank computes meanwhile.
        below, height = (rank + 0.36, 0.1) if group == "transfer" else (rank - 0.38, 0.72)
        axes.broken_barh(bars, (below, height), color=COLOURS[group], alpha=shade, edgecolor="white", linewidth=0.4)
    shades = _shades(events)
    computed = [event for event in events if event.action.kind in COMPUTE]
    if len(computed) <= MOST_LABELS:
        for rank, action, start, stop in computed:
            if stop - start > end / 200:
                shade = shades[rank][action.stage]
                red, green, blue = (1 - shade * (1 - part) for part in to_rgb(COLOURS[action.kind]))
                dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < _DARK
                axes.text(
                    (start + stop) / 2, rank - 0.02, str(action.microbatch), ha="center", va="center", fontsize=6,
                    color="white" if dark else "black", clip_on=True,
                )  # fmt: skip
    axes.set(xlim=(0, end), ylim=(ranks - 0.4, -0.5), xlabel="time", ylabel="rank", yticks=range(ranks))
    axes.set_title(title, fontsize=9, loc="left")
    shown = [group for group in COLOURS if any(_group(event.action) == group for event in events)]
    handles = [Patch(color=COLOURS[group], label=LABELS[group]) for group in shown]
    chunks = sorted({shade for row in shades.values() for shade in row.values()}, reverse=True)
    if len(chunks) > 1:
        handles += [Patch(color="black", alpha=shade, label=f"chunk {at}") for at, shade in enumerate(chunks)]
    axes.legend(
        handles=handles, ncols=len(handles) or 1, fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.22), frameon=False
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _shades(events: Sequence[Event]) -> dict[int, dict[int, float]]:
    """The opacity of each rank's stages: later chunks of a rank are paler."""
    own: dict[int, set[int]] = {}
    for event in events:
        own.setdefault(event.rank, set()).add(event.action.stage)
    return {
        rank: {stage: 1 - 0.5 * at / max(1, len(stages) - 1) for at, stage in enumerate(sorted(stages))}
        for rank, stages in own.items()
    }


def _bars(events: Sequence[Event]) -> dict[tuple[int, str, float], list[tuple[float, float]]]:
    """Returns the bars that are drawn in one go: (rank, group, opacity) -> (start, length)."""
    shades = _shades(events)
    bars: dict[tuple[int, str, float], list[tuple[float, float]]] = {}
    for rank, action, start, end in events:
        bars.setdefault((rank, _group(action), shades[rank][action.stage]), []).append((start, end - start))
    return bars
