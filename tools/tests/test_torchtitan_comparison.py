"""The comparison with TorchTitan: what is absent is called skipped, targets are judged, lines are counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).absolute().parents[2] / "benchmarks/torchtitan"


@pytest.fixture
def modules(monkeypatch):
    """side_by_side and lines, imported as they are when the script runs."""
    import importlib

    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("side_by_side"), importlib.import_module("lines")
    for name in ("side_by_side", "lines", "setting"):
        sys.modules.pop(name, None)


def test_without_its_environment_it_is_skipped_and_never_simulated(tmp_path):
    said = subprocess.run(
        [sys.executable, FOLDER / "side_by_side.py", "lines"],
        env={**os.environ, "TORCHTITAN_PYTHON": str(tmp_path / "python")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said.returncode == 0, said.stderr
    record = json.loads(said.stdout.splitlines()[-1])
    assert record["figures"][0]["lines"]["TorchTitan"] == "skipped"
    assert "a user of TorchTitan writes skipped" in said.stdout


def test_a_layouts_table_says_skipped(modules, capsys):
    side_by_side, _ = modules
    figures = {
        "layout": "TP 8", "cpu ms per step and rank": {"veScale": 1.5}, "skipped": [side_by_side.SPMD],
        "cpu over": {}, "losses": {"veScale": [8.0]},
    }  # fmt: skip
    side_by_side.show(figures)
    assert "TorchTitan spmd_types             skipped: no environment holds TorchTitan" in capsys.readouterr().out
    assert side_by_side.verdicts([figures]) == []  # nothing to judge: neither met nor missed


@pytest.mark.parametrize(("ratio", "holds"), [(0.84, True), (0.86, False)])
def test_targets_are_judged(modules, ratio, holds):
    side_by_side, _ = modules
    figures = {"layout": "TP 8", "cpu over": {side_by_side.BARE: {side_by_side.OURS: ratio}}}
    (row,) = side_by_side.verdicts([figures])
    assert row["holds"] is holds and row["at most"] == 0.85 and row["is"] == ratio


def test_a_ratio_is_the_median_of_pairs(modules):
    side_by_side, _ = modules
    assert side_by_side.ratio([1.0, 2.0, 30.0], [2.0, 4.0, 10.0]) == 0.5


def test_lines_of_code_are_counted(modules):
    _, lines = modules
    about = '"""About."""'
    function = 'def f():\n    """What.\n\n    More.\n    """\n    # why\n    return (\n        1\n    )'
    source = f"{about}\n\nimport os  # a comment\n\n\n{function}\n"
    assert lines.count(source) == 5
