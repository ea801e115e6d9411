"""Long grids of tests in parts: a pytest plugin that notes what came of each test, and leaves out what has passed.

    VESCALE_GRID=full python -m pytest -q -p sweeps.recorded --recorded FILE packages/...

FILE has a line of JSON per test that ran: its name, "passed" or its error's last line, seconds, the commit and whether
files differed from it. A run that was cut off goes on where it stopped; what failed runs again. The last of a test's
lines counts. `python tools/sweeps/recorded.py FILE` prints the counts, and what has not passed, as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PASSED = "passed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--recorded", metavar="FILE", type=Path, help="lines of JSON, one per test that ran")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = {name for name, line in read(config.getoption("--recorded")).items() if line["outcome"] == PASSED}
    left = [item for item in items if item.nodeid not in done]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = left


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if call.when == "call" or report.outcome != PASSED:
        said = str(call.excinfo.value).strip().splitlines() if call.excinfo else []
        outcome = PASSED if report.outcome == PASSED else f"{report.outcome}: {' | '.join(said[-2:])[:400]}"
        line = {"test": item.nodeid, "outcome": outcome, "seconds": round(report.duration, 1), "tree": tree()}
        with item.config.getoption("--recorded").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return report


@cache
def tree() -> str:
    """The commit, and "+" where files differ from it."""
    asked = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def read(file: Path, key: str = "test") -> dict[Any, dict]:
    """The last line of each test, or of whatever `key` names."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {line[key]: line for line in map(json.loads, lines)}


def resumed(
    file: Path, key: str, cases: Iterable[Any], run: Callable[[Any], dict], unsaid: Sequence[str]
) -> list[dict]:
    """Runs the cases that the file has no line of, and adds one for each; prints it without what is `unsaid`. Returns
    all lines."""
    known = read(file, key)
    file.parent.mkdir(parents=True, exist_ok=True)
    for case in cases:
        if case not in known:
            known[case] = run(case)
            with file.open("a") as lines:
                lines.write(json.dumps(known[case]) + "\n")
            print({name: value for name, value in known[case].items() if name not in unsaid}, flush=True)
    return [*known.values()]


def main() -> int:
    lines = read(Path(sys.argv[1])).values()
    wrong = {line["test"]: line["outcome"] for line in lines if line["outcome"] != PASSED}
    trees = sorted({line["tree"] for line in lines})
    print(json.dumps({"ran": len(lines), PASSED: len(lines) - len(wrong), "trees": trees, "not": wrong}, indent=1))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
