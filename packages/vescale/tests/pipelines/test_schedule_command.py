"""`vescale schedule` draws, states and proves; what is wrong is said without a traceback."""

import json
import sys

import pytest
from typer.testing import CliRunner

from vescale.cli import app, main
from vescale_pipeline import Schedule, generate

RUN = CliRunner()


def _run(*arguments):
    result = RUN.invoke(app, ["schedule", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_of_the_issue(tmp_path):
    picture = tmp_path / "out.png"
    shown = _run("--kind", "zbv", "--stages", 4, "--microbatches", 8, "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "bubble         5.9% at a barrier, 0.0% in ranks' own windows" in shown
    assert "peak memory    4, 4, 4, 4 microbatches" in shown
    assert "adds up        in microbatch order" in shown


def test_a_schedule_of_the_users_own(tmp_path):
    written, trace = tmp_path / "mine.json", tmp_path / "trace.json"
    first = _run("--kind", "1f1b", "--stages", 2, "--microbatches", 3, "--out", written)
    assert Schedule.from_json(written.read_text()) == generate("1f1b", 2, 3)
    second = _run("--file", written, "--trace", trace)
    assert first.splitlines()[:-1] == second.splitlines()[:-1]
    assert len(json.loads(trace.read_text())["traceEvents"]) > 12


def test_costs_count():
    assert "makespan       33" in _run("--kind", "gpipe")
    assert "makespan       66" in _run("--kind", "gpipe", "--forward", 2, "--input-gradient", 2, "--weight-gradient", 2)


def test_errors_have_no_traceback(tmp_path, monkeypatch, capsys):
    for arguments, says in (
        (("--kind", "2f2b"), "generate: there is no schedule '2f2b'"),
        (("--kind", "gpipe", "--budget", "4"), "memory: rank 0 holds activations of 8"),
        (("--file", str(tmp_path / "none.json")), "none.json cannot be read"),
        (("--png", str(tmp_path / "out.bmp")), "'out.bmp' ends in none of .png, .svg, .json"),
    ):
        monkeypatch.setattr(sys, "argv", ["vescale", "schedule", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
