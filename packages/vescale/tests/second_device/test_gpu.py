"""`make gpu`, rehearsed on the second device: each part by some questions; a run goes on where it ended."""

import json
import os
import subprocess
import sys

import pytest

from gpu.__main__ import PARTS
from vescale_testkit import in_turns, slice_of


def rehearsed(folder, *given):
    """Its status, what it printed, and the parts of its report."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "gpu", "--device", "second", "--into", str(folder), *given]
    ended = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=400)
    (report,) = (folder / "results").glob("*-gpu-rehearsal.json")
    found = json.loads(report.read_text())
    assert {"date", "device", "torch", "python", "commit"} <= found.keys()
    assert "cut off" not in found, ended.stdout + ended.stderr
    return ended.returncode, ended.stdout, found["parts"]


def test_all_parts_end_within_twenty_minutes():
    assert sum(part.seconds for part in PARTS if part.is_default) <= 20 * 60


@pytest.mark.parametrize("name", [*slice_of([part.name for part in PARTS if part.is_default], 5), "nccl", "peers"])
def test_a_part_answers_on_the_second_device(tmp_path, name):
    _, said, parts = rehearsed(tmp_path, name, "--most", "4" if name == "nccl" else "2")
    answers = {key: answer for key, answer in parts[name].items() if key != "not reached"}
    assert answers, said
    for key, answer in answers.items():
        assert "failed" not in answer and answer.get("holds", True) is True, (key, answer)


def test_a_python_that_lacks_a_package_is_one_sentence(tmp_path):
    """It was the failure of every question, after minutes of a machine's time."""
    (tmp_path / "crc32c.py").write_text("raise ModuleNotFoundError('No module named crc32c')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "gpu", "--device", "second", "--into", str(tmp_path)]
    ended = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=100)
    assert ended.returncode == 2 and not (tmp_path / "results").exists()
    assert "cannot run veScale: ModuleNotFoundError: No module named crc32c" in ended.stdout


@in_turns(3)
def test_a_run_that_was_cut_off_goes_on_and_says_what_is_missing(tmp_path):
    status, said, first = rehearsed(tmp_path, "premise", "--most", "1")
    assert status == 1 and list(first["premise"]) == ["premise", "not reached"], said
    assert "premise: not reached: premise, deterministic algorithms, cost" in said
    status, said, second = rehearsed(tmp_path, "premise")
    assert status == 0 and "  premise: " not in said and "  cost: " in said, said
    assert list(second["premise"]) == ["premise", "premise, deterministic algorithms", "cost"]
    assert second["premise"]["premise"] == first["premise"]["premise"]
