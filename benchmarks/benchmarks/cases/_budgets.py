"""What each promised ratio may be at most: headlines.toml, beside asv.conf.json, is the one place that says it."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

HEADLINES = Path(__file__).absolute().parents[2] / "headlines.toml"


@cache
def _budgets() -> dict[tuple[str, ...], float]:
    rows = tomllib.loads(HEADLINES.read_text())["headline"]
    return {(row["benchmark"], *row["parameters"]): row["budget"] for row in rows if "budget" in row}


def budget_of(benchmark: str, *parameters: str) -> float | None:
    """The budget of an ASV benchmark at these parameters; None: it has none."""
    return _budgets().get((benchmark, *parameters))
