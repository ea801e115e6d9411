"""`vescale checkpoint`, called as a user calls it."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import vescale
from architectures import register
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


# --- what it says, as one types it ---------------------------------------------------------------------------------


def spoiled(run, kind):
    """The run with one thing wrong."""
    step = run / "step-00000002"
    (file,) = step.glob("*.safetensors")
    if kind == "altered":
        data = bytearray(file.read_bytes())
        data[-3] ^= 4
        file.write_bytes(data)
    if kind == "cut":
        os.truncate(file, 100)
    if kind == "no file":
        file.unlink()
    if kind == "no manifest":
        (step / "manifest.json").unlink()
    if kind == "renamed":
        step.rename(run / "step-00000007")
    if kind == "no manifest of it":
        (step / "manifest.json").write_text("{}")
    return run


SPOILED = ["whole", "altered", "cut", "no file", "no manifest", "renamed", "no manifest of it"]
COMMANDS = {
    "inspect": lambda run, out: ["inspect", run],
    "verify": lambda run, out: ["verify", run, "--step", 2],
    "diff": lambda run, out: ["diff", run / "step-00000001", run],
    "export": lambda run, out: ["export", run, out],
    "export of nothing": lambda run, out: ["export", run, out, "--key", "modle"],
    "export of no weights": lambda run, out: ["export", run, out, "--key", "optimizer"],
    "reshard": lambda run, out: ["reshard", run, out, "--ranks", 2],
    "reshard into itself": lambda run, out: ["reshard", run, run, "--ranks", 2],
    "reshard into a step": lambda run, out: ["reshard", run / "step-00000001", run / "step-00000001", "--ranks", 2],
    "of another protocol": lambda run, out: ["inspect", f"nosuch://{run}"],
}


@pytest.mark.parametrize("kind", SPOILED)
@pytest.mark.parametrize("command", COMMANDS)
def test_remedies_are_commands_options_and_paths(run, tmp_path, command, kind):
    """None is a call of Python; options are the command's own, and paths that are named can be given."""
    args = [*map(str, COMMANDS[command](spoiled(run, kind), tmp_path / "out"))]
    result = CliRunner().invoke(app, ["checkpoint", *args])
    remedies = getattr(result.exception, "remedies", ())
    known = CliRunner().invoke(app, ["checkpoint", args[0], "--help"], env={"COLUMNS": "200"}).output
    for code, cost in remedies:
        assert not re.search(r"\w\(", code) and "`" not in code + cost, code
        assert all(option in known for option in re.findall(r"--[a-z]+", code)), code
        if code.startswith("the path ") and "step-" in code and args[0] != "reshard":
            call("inspect", code.removeprefix("the path "))
        if code.startswith("--key ") and kind == "whole":
            call(*args[: args.index("--key")], *code.split())
    if args[0] == "reshard" and result.exit_code:
        assert not os.path.exists(tmp_path / "out")


def test_which_of_two_steps_is_altered(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    spoiled(other, "altered")
    for paths in ((run, other), (other, run)):
        result = CliRunner().invoke(app, ["checkpoint", "diff", *map(str, paths)])
        assert f"file  {other}/step-00000002/" in str(result.exception)


def test_a_plan_is_shown_in_lines(tmp_path):
    plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=1)
    vescale.save(tmp_path, {"plan": plan, "step": 1, "x": 1}, metrics={"loss": 0.5})
    said = call("inspect", tmp_path)
    assert "\\n" not in said
    rest = said.partition("  plan  ")[2]
    text = rest[: rest.index("\n  meshes") if "\n  meshes" in rest else rest.index("\n  world_size")]
    assert vescale.Plan.from_json(text) == plan and json.loads(text)["zero"] == 1
    assert all(line.startswith("    ") for line in text.splitlines()[1:])  # none can be taken for another field


def test_one_is_not_several(run):
    vescale.save(run, {"x": torch.ones(1)}, step=3)
    assert "1 tensor," in call("inspect", run)
    spoiled(run, "no file")
    assert ": 1 fault" in call("verify", run, "--step", 2, status=1).replace("faults", "")
    vescale.save(run, {"x": torch.zeros(1)}, step=4)
    assert call("diff", run / "step-00000003", run, status=1).endswith("1 difference\n")


@pytest.mark.parametrize("key", ["optimizer", "optimizer.state", "nested", "nested.one", "scheduler"])
def test_only_weights_are_exported(tmp_path, key):
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adagrad(layer.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    ema = {name: p.detach().clone() for name, p in layer.named_parameters()}
    state = {"net": layer, "optimizer": optimizer, "nested": {"one": optimizer}, "scheduler": scheduler, "ema": ema}
    vescale.save(tmp_path / "run", state)
    result = CliRunner().invoke(
        app, ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--key", key]
    )
    assert result.exit_code == 1 and "keys with weights  net, ema" in str(result.exception)
    assert [code for code, _ in result.exception.remedies] == ["--key net", "--key ema"]
    assert not os.path.exists(tmp_path / "out")
    for weights in ("net", "ema"):
        call("export", tmp_path / "run", tmp_path / weights, "--key", weights)
        assert set(load_file(tmp_path / weights / "model.safetensors")) == {"weight", "bias"}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_what_is_exported_like_a_published_folder_is_served(tmp_path, name):
    """Under its names (Mixtral's experts one by one), with its configuration; another step's logits are told apart."""
    start = register.build(name)
    start.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer_config.json").write_text("{}")
    for step in (1, 2):
        with torch.no_grad():
            start.lm_head.weight.add_(0.1)
        vescale.save(tmp_path / "run", {"model": start}, step=step)
    call("export", tmp_path / "run", tmp_path / "out", "--like", tmp_path / "base")
    assert (tmp_path / "out" / "tokenizer_config.json").exists() and (tmp_path / "out" / "config.json").exists()
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    assert torch.equal(exported["lm_head.weight"], start.lm_head.weight)
    said = call("serve-check", tmp_path / "out", "--against", tmp_path / "run")
    assert "WRONG" not in said and "to the bit" in said and "which vLLM reads" in said
    said = call("serve-check", tmp_path / "out", "--against", tmp_path / "run", "--step", 1, status=1)
    assert "WRONG logits differ" in said
    narrow = {name: one.bfloat16() for name, one in exported.items()}
    save_file(narrow, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    said = call("serve-check", tmp_path / "out", "--against", tmp_path / "run")
    assert "as bfloat16 rounds" in said and "files hold bfloat16" in said
    del narrow["lm_head.weight"]
    narrow["head"] = narrow["model.norm.weight"].clone()
    save_file(narrow, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    said = call("serve-check", tmp_path / "out", status=1)
    assert "WRONG transformers loads it" in said and "not head, lm_head.weight" in said
    assert "does not load it" in call("serve-check", tmp_path / "nothing", status=1)


def test_what_is_served_is_the_class_that_the_configuration_names(tmp_path):
    """Not the causal one that its kind has, too."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=16, **sizes)).save_pretrained(tmp_path)
    assert "transformers loads it into BertForMaskedLM" in call("serve-check", tmp_path)
