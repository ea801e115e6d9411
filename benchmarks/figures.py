"""Figures: what ASV measured, as one series of values per benchmark and parameters, in the order of the commits.

ASV keeps one JSON file per commit and machine. A figure is read across them; a commit at which it was not measured, or
failed, has no point. The headlines (headlines.toml) are the figures that the project promises.

A step up is a regression: a value more than the figure's threshold above the median of the (at most five) points
before it. Points that were themselves regressions are left out of that median, so that a second bad commit is measured
against the last good ones, and one that mends it is no step. (ASV's own step detection needs more commits on each side
than a gate on the newest commit can have.)
"""

from __future__ import annotations

import itertools
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

from asv.config import Config
from asv.results import Results, iter_results

WINDOW = 5
THRESHOLD = 0.10


@dataclass(frozen=True)
class Headline:
    """A row of headlines.toml. `cause`: why it is over its budget, where that is so, and where to read on."""

    benchmark: str
    parameters: tuple[str, ...]
    title: str
    budget: float | None = None
    threshold: float = THRESHOLD
    cause: str = ""


@dataclass(frozen=True)
class Point:
    """One commit's value. `subject`: the commit's first line."""

    commit: str
    value: float
    subject: str = ""


@dataclass(frozen=True)
class Figure:
    """One benchmark at one choice of parameters, on one machine."""

    benchmark: str
    parameters: tuple[str, ...]
    machine: str
    points: tuple[Point, ...]
    headline: Headline | None = None
    is_peer: bool = False

    @property
    def title(self) -> str:
        if self.headline is not None:
            return self.headline.title
        return f"{self.benchmark}({', '.join(self.parameters)})" if self.parameters else self.benchmark

    @property
    def threshold(self) -> float:
        return THRESHOLD if self.headline is None else self.headline.threshold

    @property
    def latest(self) -> Point:
        return self.points[-1]

    @property
    def over_budget(self) -> bool:
        return (
            self.headline is not None
            and self.headline.budget is not None
            and (self.latest.value > self.headline.budget)
        )

    @property
    def regressions(self) -> tuple[int, ...]:
        """Which points got worse, as indices into `points`: stepped up, or down where more is better."""
        if self.is_peer:
            return ()
        steps: list[int] = []
        good: list[float] = []
        for i, point in enumerate(self.points):
            if good and self._is_worse(point.value, median(good[-WINDOW:])):
                steps.append(i)
            else:
                good.append(point.value)
        return tuple(steps)

    def _is_worse(self, value: float, before: float) -> bool:
        if self.benchmark.endswith("per_second"):
            return value < before / (1 + self.threshold)
        return value > before * (1 + self.threshold)

    @property
    def regressed(self) -> bool:
        """Whether the newest point did."""
        return bool(self.regressions) and self.regressions[-1] == len(self.points) - 1


def read_headlines(config: Path) -> tuple[tuple[Headline, ...], frozenset[str]]:
    """The headlines, and the names of the peers, of the headlines.toml beside an asv.conf.json."""
    register = tomllib.loads((config.parent / "headlines.toml").read_text())
    rows = (Headline(**{**row, "parameters": tuple(row["parameters"])}) for row in register["headline"])
    return tuple(rows), frozenset(register.get("peers", ()))


def read_config(config: Path) -> Any:
    """ASV's configuration, with its paths made absolute."""
    read = Config.load(str(config))
    for name in ("repo", "benchmark_dir", "results_dir", "html_dir"):
        setattr(read, name, str((config.parent / getattr(read, name)).resolve()))
    return read


def commits_of(repository: str | Path, count: int | None = None) -> list[str]:
    """The newest `count` commits of the checked-out branch (all without it), oldest first."""
    limit = [] if count is None else [f"--max-count={count}"]
    listed = subprocess.run(
        ["git", "rev-list", "--first-parent", *limit, "HEAD"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    )
    return listed.stdout.split()[::-1]


def subjects_of(repository: str | Path) -> dict[str, str]:
    """The first line of every commit of the checked-out branch."""
    command = ["git", "log", "--first-parent", "--format=%H %s", "HEAD"]
    listed = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout
    return dict(line.split(" ", 1) for line in listed.splitlines() if " " in line)


def read_figures(config: Path) -> list[Figure]:
    """Every figure with at least one point on the checked-out branch, headlines first, in their order."""
    settings = read_config(config)
    order, subjects = {commit: i for i, commit in enumerate(commits_of(settings.repo))}, subjects_of(settings.repo)
    headlines, peers = read_headlines(config)
    named = {(row.benchmark, row.parameters): row for row in headlines}
    series: dict[tuple, dict[int, Point]] = {}
    for results in iter_results(settings.results_dir):
        if results.commit_hash in order:
            for key, value in _values(results):
                point = Point(results.commit_hash, value, subjects.get(results.commit_hash, ""))
                series.setdefault((*key, results.params["machine"]), {})[order[results.commit_hash]] = point
    figures = [
        Figure(
            name,
            parameters,
            machine,
            tuple(points[i] for i in sorted(points)),
            named.get((name, parameters)),
            not peers.isdisjoint(parameters),
        )
        for (name, parameters, machine), points in series.items()
    ]
    rank = {row: i for i, row in enumerate(named.values())}
    return sorted(figures, key=lambda each: (rank.get(each.headline, len(rank)), each.machine, each.title))


def read_machines(config: Path) -> list[str]:
    """Each machine that measured something here, in words."""
    found = {}
    for results in iter_results(read_config(config).results_dir):
        of = results.params
        memory = f"{int(of['ram']) / 2**30:.0f} GiB" if of.get("ram", "").isdigit() else "memory unknown"
        found[of["machine"]] = f"{of['machine']}: {of.get('num_cpu', '?')} x {of.get('cpu', '?')}, {memory}, {of['os']}"
    return sorted(found.values())


def _values(results: Results):
    """(benchmark, parameters) and the value, of each that succeeded. ASV writes parameters as their repr."""
    for name in results.get_all_result_keys():
        choices: Sequence[Sequence[str]] = results.get_result_params(name)
        values = results.get_result_value(name, choices)
        for parameters, value in zip(itertools.product(*choices), values, strict=True):
            if isinstance(value, (int, float)) and not isnan(value):
                yield (name, tuple(text.strip("'\"") for text in parameters)), float(value)
