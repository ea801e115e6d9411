"""Common style of the pages: one colour and one meaning for each part of a step, and their legend."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from vescale_pipeline.draw import COLOURS as ACTIONS

COLOURS = {
    "forward": ACTIONS["F"], "backward": ACTIONS["B"], "optimizer": ACTIONS["REDUCE"],
    "collective": "#bab0ac", "exposed": "#e15759", "other": "#bab0ac",
    **{kind: ACTIONS[kind] for kind in "FBIW"},
}  # fmt: skip
"""Of phases as `record` and `timeline` name them, and of a pipeline's actions: those of a schedule's picture."""

LEGEND = """
.legend span { margin-right: 1.4em; white-space: nowrap; display: inline-block }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 5px }
"""


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """A line of (colour, what it means)."""
    keys = "".join(f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for colour, text in entries)
    return f'<p class="legend">{keys}</p>'
