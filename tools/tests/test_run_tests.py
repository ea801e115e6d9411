"""How test cases are counted, and that a target that hangs or dies counts as a failure."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

import run_tests
from checks.build_graph import BuildGraph, Target
from run_tests import Outcome, read_events, read_report

TOP = Path(__file__).absolute().parents[2]

REPORT = """<testsuites><testsuite name="pytest">
<testcase name="a"/>
<testcase name="b"><failure message="no"/></testcase>
<testcase name="c"><error message="no"/></testcase>
<testcase name="d"><skipped/></testcase>
<testcase name="e"/>
</testsuite></testsuites>"""


def test_cases_are_counted_one_by_one(tmp_path):
    report = tmp_path / "test.xml"
    report.write_text(REPORT)
    assert read_report(report, target_passed=False) == Outcome(passed=2, failed=2, skipped=1)


def test_a_target_that_failed_has_a_failure(tmp_path):
    report = tmp_path / "test.xml"
    report.write_text("<testsuites><testsuite><testcase/><testcase/></testsuite></testsuites>")
    assert read_report(report, target_passed=False) == Outcome(passed=1, failed=1)
    report.write_text("<testsuites>")
    assert read_report(report, target_passed=False) == Outcome(failed=1)
    assert read_report(tmp_path / "none.xml", target_passed=False) == Outcome(failed=1)


def test_bazels_events_name_the_report_of_each_target(tmp_path):
    report = tmp_path / "a report.xml"
    report.write_text(REPORT)
    result = {
        "id": {"testResult": {"label": "//packages/dtensor:core"}},
        "testResult": {
            "status": "FAILED",
            "testActionOutput": [{"name": "test.log"}, {"name": "test.xml", "uri": report.as_uri()}],
        },
    }
    events = tmp_path / "events.json"
    events.write_text("\n".join(map(json.dumps, [{"id": {"started": {}}}, result])))
    assert read_events(events) == {"//packages/dtensor:core": Outcome(passed=2, failed=2, skipped=1)}
    assert read_events(tmp_path / "none.json") == {}


@pytest.fixture
def one_target(tmp_path, monkeypatch):
    """Runs one test file, as a tree with that one target would."""
    settings = tmp_path / "pyproject.toml"
    settings.write_text((TOP / "pyproject.toml").read_text())
    main = tmp_path / "tools/build_defs/pytest_main.py"
    main.parent.mkdir(parents=True)
    main.write_text((TOP / "tools/build_defs/pytest_main.py").read_text())
    monkeypatch.setattr(run_tests, "TOP", tmp_path)

    def run(source, seconds=60.0):
        (tmp_path / "test_one.py").write_text(source)
        target = Target("pytest_test", "", "one", {"srcs": ["test_one.py"], "deps": []})
        return run_tests.run_target(BuildGraph({target.label: target}), target, seconds)

    return run


def test_a_target_that_passes(one_target):
    outcome, _ = one_target("def test_a(): pass\ndef test_b(): pass\n")
    assert outcome == Outcome(passed=2)


def test_a_target_that_fails_shows_its_log(one_target):
    outcome, log = one_target("def test_a(): pass\ndef test_b(): assert 1 == 2\n")
    assert outcome == Outcome(passed=1, failed=1)
    assert "assert 1 == 2" in log


def test_a_target_without_tests_is_a_failure(one_target):
    outcome, _ = one_target("")
    assert outcome == Outcome(failed=1)


def test_a_target_that_dies_is_a_failure(one_target):
    outcome, _ = one_target("import os\ndef test_a(): os.abort()\n")
    assert outcome == Outcome(failed=1)


def test_a_target_that_hangs_is_stopped(one_target):
    started = time.monotonic()
    outcome, log = one_target("import time\ndef test_a(): time.sleep(60)\n", seconds=3)
    assert outcome == Outcome(failed=1)
    assert "was stopped after 3 s" in log
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("beyond", "grid", "status", "names"),
    [
        ("# why\n{file}::test_dear[2]\n", None, 0, ["test_dear[1]", "test_cheap"]),
        ("{file}::test_dear[2]\n", "full", 0, ["test_dear[1]", "test_dear[2]", "test_cheap"]),
        ("{file}::test_gone\n", None, 4, []),
    ],
    ids=["left out", "in full", "gone"],
)
def test_the_core_is_what_no_list_leaves_out(tmp_path, monkeypatch, beyond, grid, status, names):
    file = "packages/one/tests/test_it.py"
    source = "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_dear(n): pass\ndef test_cheap(): pass\n"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    (tmp_path / file).with_name("beyond_the_core.txt").write_text(beyond.format(file=file))
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.delenv("VESCALE_GRID", raising=False)
    given = {"XML_OUTPUT_FILE": str(tmp_path / "test.xml"), **({"VESCALE_GRID": grid} if grid else {})}
    command = [sys.executable, str(TOP / "tools/build_defs/pytest_main.py"), "--", file]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **given}, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    if status:
        assert "test_gone" in done.stderr
    else:
        cases = ElementTree.parse(tmp_path / "test.xml").iter("testcase")
        assert [case.get("name") for case in cases] == names


def test_lists_name_files_that_are_there():
    for one in TOP.glob("packages/*/tests/beyond_the_core.txt"):
        files = {line.partition("::")[0] for line in one.read_text().splitlines() if not line.startswith("#")}
        assert files and [file for file in sorted(files) if not (TOP / file).is_file()] == []
