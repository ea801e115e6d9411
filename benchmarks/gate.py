"""Fails when a headline ratio regressed at the newest commit that was measured, or is over its budget there.

    python benchmarks/gate.py [--config other/asv.conf.json]

Exit status 0: no headline regressed and all are within budget; 1: one is not; 2: nothing was measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from figures import Figure, read_figures, read_headlines
from history import CONFIG


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="another suite's asv.conf.json")
    config = parser.parse_args().config.absolute()
    figures = [each for each in read_figures(config) if each.headline]
    if not figures:
        print("gate: no headline was measured; run make bench-history first", file=sys.stderr)
        return 2
    bad = 0
    for figure in figures:
        words = verdict(figure)
        bad += bool(words)
        print(f"{'FAIL' if words else 'ok':<5}{figure.latest.value:>8.3f}  {figure.title}{words and ': ' + words}")
    closing = f"{bad} of {len(figures)} headlines fail" if bad else f"{len(figures)} headlines hold"
    print(f"gate: {closing}{unmeasured(config, figures)}")
    return int(bad > 0)


def unmeasured(config: Path, figures: Sequence[Figure]) -> str:
    """How many of the promised figures no commit has; empty when all are there."""
    count = len({*read_headlines(config)[0]} - {each.headline for each in figures})
    return f"; {count} were not measured" if count else ""


def verdict(figure: Figure) -> str:
    """Why a figure fails; empty when it does not."""
    reasons = []
    if figure.regressed:
        before = figure.points[-2].value
        reasons.append(f"regressed at {figure.latest.commit[:10]}, from {before:.3f} to {figure.latest.value:.3f}")
    if figure.over_budget:
        cause = f" ({figure.headline.cause})" if figure.headline.cause else ", of unknown cause"
        reasons.append(f"over its budget of {figure.headline.budget:.2f}{cause}")
    return "; ".join(reasons)


if __name__ == "__main__":
    sys.exit(main())
