"""What the demo shows when a model is done: a table, a verdict, a picture, a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display on a server; must come before pyplot

from comparison import TOLERANCE, Comparison
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from rich.console import Console
from rich.table import Table

# A longer run shows every k-th step, its last and its worst; the JSON file has all of them.
TABLE_ROWS = 60

SINGLE_COLOUR, PARALLEL_COLOUR, LIMIT_COLOUR = "#9ec9e8", "#0b3c6f", "#c0392b"

# A float32 loss resolves 6e-8 of itself; an exact match, which a log axis cannot show,
# is drawn here, below every difference that can occur.
EXACT = 2e-8


def print_comparison(console: Console, runs: Comparison) -> None:
    """Both losses of every step side by side, then the verdict."""
    table = Table(title=f"{runs.title}: loss per step", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("1 process", justify="right")
    table.add_column(runs.layout, justify="right")
    table.add_column("relative difference", justify="right")
    steps = len(runs.single)
    stride = -(-steps // TABLE_ROWS)
    shown = sorted({*range(0, steps, stride), steps - 1, runs.worst_step})
    for step in shown:
        difference = runs.differences[step]
        table.add_row(
            str(step + 1),
            f"{runs.single[step]:.6f}",
            f"{runs.parallel[step]:.6f}",
            f"{difference:.1e}" if difference else "0",
            style=None if difference <= TOLERANCE else "red",
        )
    console.print(table)
    console.print(verdict(runs), style="green" if runs.agrees else "bold red", highlight=False)
    console.print()


def verdict(runs: Comparison) -> str:
    """One sentence: the largest difference, where, and whether it is within the tolerance."""
    step = runs.worst_step
    apart = abs(runs.parallel[step] - runs.single[step])
    judgement = "within" if runs.agrees else "MORE than"
    return (
        f"{runs.title}: largest difference {runs.largest:.1e} relative ({apart:.1e} absolute), "
        f"at step {step + 1} of {len(runs.single)}: {judgement} the tolerance of {TOLERANCE:.0e}"
    )


def write_json(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Every loss, unrounded."""
    record = {
        runs.name: {
            "layout": runs.layout,
            "single": runs.single,
            "parallel": runs.parallel,
            "largest_relative_difference": runs.largest,
            "within_tolerance": runs.agrees,
        }
        for runs in comparisons
    }
    path.write_text(json.dumps({"tolerance": TOLERANCE, "models": record}, indent=1) + "\n")


def plot(path: Path, comparisons: Sequence[Comparison]) -> None:
    """A PNG: per model a column, the two curves above, their relative difference below."""
    style = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e6e6e6",
        "legend.frameon": False,
    }
    with pyplot.rc_context(style):
        figure, grid = pyplot.subplots(
            2,
            len(comparisons),
            figsize=(1.2 + 5.4 * len(comparisons), 6.4),
            sharex="col",
            sharey="row",
            squeeze=False,
            height_ratios=(5, 2),
            layout="constrained",
        )
        for column, runs in enumerate(comparisons):
            _plot_losses(grid[0][column], runs)
            _plot_differences(grid[1][column], runs)
        figure.suptitle("The same training on one process and on many", x=0.01, ha="left")
        grid[0][0].set_ylabel("loss (nats per byte)")
        grid[1][0].set_ylabel("relative\ndifference")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _plot_losses(axes: Axes, runs: Comparison) -> None:
    steps = range(1, len(runs.single) + 1)
    # One process as a broad band, the parallel run as a thin dotted line inside it: equal
    # curves would otherwise hide one another.
    axes.plot(steps, runs.single, color=SINGLE_COLOUR, linewidth=7, label="1 process")
    axes.plot(
        steps,
        runs.parallel,
        color=PARALLEL_COLOUR,
        linewidth=1.2,
        marker="o",
        markersize=3,
        label=runs.layout,
    )
    axes.set_title(runs.title, fontweight="bold", loc="left")
    axes.tick_params(labelleft=True)
    axes.legend(loc="upper right")


def _plot_differences(axes: Axes, runs: Comparison) -> None:
    steps = range(1, len(runs.single) + 1)
    finite = [min(difference, 1.0) for difference in runs.differences]
    axes.semilogy(
        steps,
        [max(difference, EXACT) for difference in finite],
        color=PARALLEL_COLOUR,
        linewidth=0.8,
        marker="o",
        markersize=3,
    )
    axes.axhline(TOLERANCE, color=LIMIT_COLOUR, linewidth=1, linestyle="--")
    axes.annotate(
        f"tolerance {TOLERANCE:.0e}",
        (1, TOLERANCE),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        color=LIMIT_COLOUR,
        fontsize=9,
    )
    if 0 in runs.differences:
        axes.annotate(
            "at the floor: equal to the last bit",
            (1, 0),
            xycoords="axes fraction",
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color="#777777",
            fontsize=9,
        )
    axes.set_ylim(EXACT / 10, max(10 * TOLERANCE, 10 * max(finite)))
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(LogLocator(numticks=4))
    axes.yaxis.set_minor_locator(NullLocator())
