"""`vescale checkpoint`, called as a user calls it."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import vescale
from vescale.cli import app


def model(seed):
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Embedding(7, 6), torch.nn.Linear(6, 7, bias=False), torch.nn.LayerNorm(7))
    made[1].weight = made[0].weight
    return made


@pytest.fixture
def run(tmp_path):
    state = {"model": model(0), "empty": torch.zeros(0, 3), "lr": 0.1, "step": 1, "plan": "dp2"}
    vescale.save(tmp_path / "run", state, metrics={"loss": 0.5})
    with torch.no_grad():
        state["model"][2].bias[3] += 0.25
    vescale.save(tmp_path / "run", state | {"lr": 0.2, "step": 2})
    return tmp_path / "run"


def call(*args, status=0):
    result = CliRunner().invoke(app, ["checkpoint", *map(str, args)], env={"COLUMNS": "200"})
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout


def test_inspect(run):
    said = call("inspect", run, "--step", 1)
    assert "step 1, 4 tensors" in said and "model.0.weight" in said and "model.1.weight" in said
    assert "dp2" in said and "'loss': 0.5" in said
    assert "model.0.weight" not in call("inspect", run, "--no-tensors")


def test_verify(run):
    assert "step-00000002: whole" in call("verify", run)
    (file,) = (run / "step-00000001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    (run / "step-00000001" / "extra").touch()
    said = call("verify", run, "--step", 1, status=1)
    assert "extra: is not of this checkpoint" in said and "block 0 of" in said and "2 faults" in said
    call("verify", run, "--step", 2)
    file.unlink()
    assert "is missing" in call("verify", run / "step-00000001", status=1)


def test_diff(run):
    said = call("diff", run / "step-00000001", run / "step-00000002", status=1)
    assert "model.2.bias: 1 of 7 elements, by at most 0.25" in said
    assert "lr: 0.1 and 0.2" in said and "step: 1 and 2" in said and "3 differences" in said
    assert "no difference" in call("diff", run, run)


def test_export(run, tmp_path):
    call("export", run, tmp_path / "out", "--step", 1)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    wanted = model(0).state_dict()
    wanted.pop("1.weight")
    assert set(weights) == set(wanted) and all(torch.equal(weights[name], wanted[name]) for name in wanted)
    there = model(5)
    vescale.load(tmp_path / "out", {"model": there})
    assert all(torch.equal(a, b) for a, b in zip(there.parameters(), model(0).parameters()))
    call("export", run, tmp_path / "out", status=1)
    call("export", run, tmp_path / "none", "--key", "ema", status=1)
    assert not os.path.exists(tmp_path / "none")


def test_reshard(run, tmp_path):
    made = Path(call("reshard", run, tmp_path / "again", "--ranks", 3).strip())
    assert made.name == "step-00000002" and len(list(made.glob("*.safetensors"))) == 3
    call("verify", tmp_path / "again")
    assert "no difference" in call("diff", run, tmp_path / "again")


def test_what_is_wrong_is_said_without_a_traceback(tmp_path):
    result = CliRunner().invoke(app, ["checkpoint", "inspect", str(tmp_path / "none")])
    assert result.exit_code == 1 and type(result.exception).__name__ == "StorageError"


@pytest.mark.parametrize("name", ["[/b] [bold red]", "[link=file:///x]y[/link]", "\x1b]0;title\x07\x1b[2J", "\ud800"])
def test_names_reach_no_terminal(tmp_path, name):
    """Neither as rich's markup nor as escape sequences; they are shown as they are, where they can be printed."""
    for folder, value in (("a", 1.0), ("b", 2.0)):
        state = {"model": {name: torch.full((3,), value)}, "x": {name: value}, "plan": f"{name} plan", "step": 1}
        step = Path(vescale.save(tmp_path / folder, state, metrics={name: value}).path)
    (step / "left [b] \x1b[2J").touch()
    said = [call("inspect", step), call("verify", step, status=1), call("diff", tmp_path / "a", step, status=1)]
    (file,) = step.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    said.append(call("verify", step, status=1))
    for text in said:
        assert all(line.isprintable() for line in text.split("\n"))
    assert "[/b]" not in name or all("[/b]" in text for text in (said[0], said[2], said[3]))
    result = CliRunner().invoke(app, ["checkpoint", "export", str(step), str(tmp_path / "out"), "--key", name])
    assert result.exit_code == 1 and str(result.exception).isprintable() is False  # lines
    assert all(line.isprintable() for line in str(result.exception).split("\n"))
