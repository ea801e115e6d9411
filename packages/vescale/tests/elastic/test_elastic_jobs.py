"""Jobs under torchrun's agents: ranks are killed, nodes go and come, and the losses do not change."""

import subprocess
import sys
from pathlib import Path

import pytest

from vescale._training.config import Config
from vescale._training.planning import plan_of
from vescale_plans import Plan

TOP = Path(__file__).absolute().parents[4]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.core), 2])
def test_a_rank_and_a_node_are_killed(tmp_path, ranks):
    """The example itself. That the node comes in time is not asked: a fast machine is through by then."""
    command = [sys.executable, str(TOP / "examples/elastic/train.py"), str(tmp_path / "run"), str(ranks)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=900)
    logs = [log.read_text()[-3000:] for log in tmp_path.glob("run/node-*.log")]
    assert found.returncode == 0, (found.stdout, found.stderr, logs)
    assert "60 of 60 losses are those of one device" in found.stdout
    lines = [line for line in found.stdout.splitlines() if ", from its checkpoint" in line]
    assert "is back from memory" in found.stdout and "from a neighbour's copy" in found.stdout
    assert len(lines) >= 2 and all("s after the last step" in line for line in lines), lines


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_of_a_plan_for_as_many_ranks(tmp_path, ranks):
    for each in (1, 2):
        (tmp_path / f"plan-{each}.json").write_text(Plan(mesh={"dp": each}, parameters={"*": {}}).to_json())
    given = {
        "model": {"type": "llama"},
        "data": {"text": "none"},
        "training": {"steps": 1},
        "checkpoint": {"folder": "x"},
    }
    config = Config.model_validate({**given, "plan": {"file": str(tmp_path / "plan-{ranks}.json")}})
    assert plan_of(config, None, ranks).mesh == {"dp": ranks}
