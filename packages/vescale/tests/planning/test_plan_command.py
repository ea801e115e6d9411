"""`vescale plan` plans from a config folder or a factory, with no process group and no GPU, and says what is wrong."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import vescale
from vescale import Plan, PlanError
from vescale.cli import app, main
from vescale_testkit import in_turns

RUN = CliRunner()
FACTORY = """
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

def build():
    return Wide(), torch.zeros(1, 5, 64, device="cpu")

def nothing():
    return 3
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    (tmp_path / "factories_of_a_test.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    yield "factories_of_a_test"
    sys.modules.pop("factories_of_a_test", None)


def run(*arguments):
    result = RUN.invoke(app, ["plan", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert not dist.is_initialized()
    return result.output


@in_turns(3)
def test_a_folder_with_a_config(tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    written, page = tmp_path / "plan.json", tmp_path / "out.html"
    asked = ("--world-size", 64, "--hardware", "h100", "--precision", "bfloat16")
    shown = run(tmp_path, *asked, "--html", page, "--json", written)
    assert "7.24B parameters on 64 x h100, 64 rows of 4096 positions" in shown
    assert "the choice, and the next best" in shown
    assert "model.layers.0 .. 31" in shown
    assert Plan.from_json(written.read_text()).world_size == 64
    text = page.read_text()
    assert text.count("<svg") == 4
    assert "http" not in text
    assert "<script" not in text
    for drawing in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + drawing.split("</svg>")[0] + "</svg>")


def test_the_dtype_is_the_configurations_and_the_choice_is_run_dry(tmp_path):
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=128, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(tmp_path)
    asked = (tmp_path, "--world-size", 4, "--batch", 8, "--seq", 16, "--hardware", "h100", "--forbid", "pp")
    page, written = tmp_path / "out.html", tmp_path / "plan.json"
    shown = " ".join(run(*asked, "--html", page, "--json", written).split())
    assert "in bfloat16, for the least time" in shown
    assert "as the configuration says" in shown
    assert "in a dry run, by formula" in shown and "by predict" in shown
    assert "in bfloat16, for the least time" in page.read_text()
    assert Plan.from_json(written.read_text()).precision.compute == torch.bfloat16
    wide = " ".join(run(*asked, "--precision", "float32", "--no-verify").split())
    assert "in float32, for the least time" in wide
    assert "in a dry run" not in wide
    assert "max_position_embeddings" not in shown + wide
    longer = " ".join(run(*asked[:5], "--seq", 4096, *asked[7:], "--no-verify").split())
    assert "rows of 4096 positions are longer than the configuration's max_position_embeddings, 2048" in longer


def test_a_factory_with_a_sample(factory, tmp_path):
    given = (f"{factory}:build", "--world-size", 8, "--batch", 4, "--hardware", "cpu", "--seq", 16)
    shown = run(*given, "--pin", "tp=2", "--pin", "pp=2", "--forbid", "sp", "--json", tmp_path / "plan.json")
    assert "chosen: pp=2 dp=2 tp=2" in shown
    assert dict(Plan.from_json((tmp_path / "plan.json").read_text()).mesh) == {"pp": 2, "dp": 2, "tp": 2}


@pytest.mark.parametrize("sample", ["torch.ones(1, 8)", "(torch.rand(1, 8),)", "{'x': torch.tensor([[1.0] * 8])}"])
def test_a_factory_whose_sample_has_values(tmp_path, monkeypatch, sample):
    code = (
        "import torch\n\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x)\n\n\n"
        f"def build():\n    return Net(8, 8), {sample}\n"
    )
    (tmp_path / "factory_with_values.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    try:
        assert "chosen:" in run("factory_with_values:build", "--world-size", 2, "--hardware", "cpu", "--seq", 8)
    finally:
        sys.modules.pop("factory_with_values", None)


def test_nodes_of_another_size(factory):
    given = (f"{factory}:build", "--world-size", 12, "--batch", 12, "--hardware", "h100", "--seq", 16, "--pin", "tp=4")
    for node, said in ((6, "crosses boundaries of nodes of 6"), (4, "inside a node")):
        shown = " ".join(run(*given, "--node", node, "--precision", "bf16").split())
        assert f"axis tp: 4 ranks 1 apart, {said}" in shown
        assert "in bfloat16" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--world-size", "2"], "'nowhere' is neither a folder nor module:factory"),
        (["no_such_module:f", "--world-size", "2"], "cannot be imported"),
        (["MODULE:absent", "--world-size", "2"], "cannot be imported"),
        (["MODULE:nothing", "--world-size", "2"], "gives no model but an object of type int"),
        (["MODULE:build", "--world-size", "2", "--hardware", "cpu", "--pin", "tp"], "--pin 'tp' gives no number"),
        (["MODULE:build", "--world-size", "2", "--hardware", "cpu", "--pin", "tp=7"], "leave no plan for 2 ranks"),
        (["MODULE:build", "--world-size", "2", "--hardware", "cpu", "--memory", "1e-6"], "memory binds"),
        (["MODULE:build", "--world-size", "2", "--hardware", "cpu", "--memory", "-1"], "not a number of bytes"),
        (["MODULE:build", "--world-size", "2", "--hardware", "cpu", "--seq", "0"], "seq is 0, not a number from 1 to"),
        (["MODULE:build", "--world-size", "2", "--hardware", "cpu", "--node", "0"], "--node 0 is not a positive"),
        (["MODULE:build", "--world-size", "2", "--precision", "int8"], "--precision bfloat16  # or bf16"),
        (["MODULE:build", "--world-size", "2", "--json", "absent/plan.json"], "there is no folder absent"),
        ([".", "--world-size", "2"], "holds no config that builds"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(arguments, said, factory, capsys, monkeypatch):
    arguments = [one.replace("MODULE", factory) for one in arguments]
    monkeypatch.setattr(sys, "argv", ["vescale", "plan", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


def test_the_plan_says_why_only_where_it_was_chosen():
    with pytest.raises(PlanError, match="was not made by generate_plan"):
        Plan(mesh={"dp": 2}, parameters={"*": {}}).explain()


@pytest.mark.parametrize("stages", [True, False])
def test_stages_are_verified_where_it_is_asked_for(stages, tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=64,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    asked = (tmp_path, "--world-size", 2, "--batch", 8, "--hardware", "cpu", "--seq", 16, "--pin", "pp=2")
    shown = " ".join(run(*asked, *["--verify-stages"] * stages).split())
    assert ("in a dry run" in shown) is stages
    assert "does not run dry" not in shown


SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def config(folder, **more):
    (folder / "config.json").write_text(json.dumps({**SMALL, **more}))
    return folder


@pytest.mark.parametrize(
    "more", [{"dtype": "torch.bfloat16"}, {"dtype": "auto"}, {"hidden_size": "x"}, {"num_attention_heads": 5}], ids=str
)
def test_a_config_that_does_not_build_is_said_to_be_one(tmp_path, more):
    """Of whatever type what transformers raises is."""
    result = RUN.invoke(app, ["plan", str(config(tmp_path, **more)), "--world-size", "2", "--hardware", "h100"])
    assert isinstance(result.exception, PlanError) and "holds no config that builds" in str(result.exception)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--memory", "nan", "no number of GiB"),
        ("--memory", "inf", "no number of GiB"),
        ("--html", ".", "is a folder"),
        ("--json", ".", "is a folder"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_anything_is_planned(tmp_path, option, value, said):
    given = ["plan", str(config(tmp_path)), "--world-size", "2", "--hardware", "h100", option, value]
    result = RUN.invoke(app, given)
    assert isinstance(result.exception, PlanError) and said in str(result.exception)


def test_modules_to_compute_again_can_be_pinned(tmp_path):
    shown = run(config(tmp_path), "--world-size", 2, "--hardware", "h100", "--seq", 32, "--pin", "inside=mlp")
    assert "checkpointing=mlp" in shown


REFUSED = {
    "nothing is left of a pin": {"--pin": ["tp=7"]},
    "nothing is left of two pins": {"--pin": ["tp=2", "pp=2"]},
    "all is forbidden": {"--forbid": ["dp", "tp", "pp"]},
    "memory": {"--memory": ["1e-4"]},
    "too few rows": {"--world-size": ["64"], "--batch": ["3"]},
    "objective": {"--objective": ["cheap"]},
    "hardware": {"--hardware": ["abacus"]},
    "rows": {"--batch": ["0"]},
    "positions": {"--seq": ["-1"]},
    "ranks": {"--world-size": ["0"]},
}
ASKED = {"--world-size": ["2"], "--batch": ["4"], "--hardware": ["h100"], "--seq": ["32"]}


@pytest.mark.parametrize("changed", REFUSED.values(), ids=REFUSED)
def test_what_the_command_advises_are_options_of_it_and_help(tmp_path, changed):
    def planned(options):
        given = [one for name in options for value in options[name] for one in (name, value)]
        return RUN.invoke(app, ["plan", str(folder), *given])

    folder, asked = config(tmp_path), ASKED | changed
    refused = planned(asked).exception
    assert isinstance(refused, PlanError) and refused.remedies
    for remedy, _ in refused.remedies:
        words = remedy.split()
        if words[0] == "vescale" or words[-1].isupper():  # another command, or a value that only the user knows
            continue
        helped = dict(asked)
        if words[0] == "without":
            del helped[words[1]]
        else:
            given = list(zip(words[::2], words[1::2], strict=True))
            helped |= {name: [value for other, value in given if other == name] for name, _ in given}
        mended = planned(helped)
        assert mended.exit_code == 0 or str(mended.exception) != str(refused), (remedy, mended.exception)
        assert mended.exit_code == 0 or mended.exception.rule != refused.rule, (remedy, mended.exception)


def test_what_a_run_takes_is_the_apis(tmp_path, monkeypatch):
    """One memory and one time, days, device hours and money, the same by the command and in Python, in 80 columns."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("COLUMNS", "80")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=128, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    asked = (tmp_path, "--world-size", 4, "--batch", 8, "--seq", 16, "--hardware", "h100", "--forbid", "pp")
    lines = run(*asked, "--tokens", "1e9", "--price", "2.5").splitlines()
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    plan = vescale.generate_plan(
        LlamaForCausalLM(config), world_size=4, batch=8, seq=16, hardware="h100", forbid=("pp",), verify=batch
    )
    why = plan.explain()
    dry = vescale.dry_run(plan, LlamaForCausalLM(config), batch)
    found = vescale.predict(plan, LlamaForCausalLM(config), batch, "h100")
    assert (why.peak, why.seconds) == (dry.peak, found.seconds) == (found.peak, found.seconds)
    runs = why.runs(1e9, 2.5)
    first = runs[0]
    assert first.steps == 7812500 and first.device_hours == pytest.approx(4 * 24 * first.days)
    assert first.days == pytest.approx(why.chosen.cost.total * first.steps / 86400)
    assert first.cost == 2.5 * first.device_hours and len(runs) == len(why.ranked)
    row = next(line for line in lines if f"{first.device_hours:,.0f} " in line and f"{first.cost:,.0f}" in line)
    assert f"{first.days:,.4g}" in row
    text = "\n".join(lines)
    assert all(len(line) <= 80 for line in lines) and "by predict" in text
    for bad in (["--price", "2"], ["--tokens", "0"], ["--tokens", "nan"]):
        with pytest.raises(PlanError, match="--tokens"):
            raise RUN.invoke(app, ["plan", *map(str, (*asked, *bad))]).exception
