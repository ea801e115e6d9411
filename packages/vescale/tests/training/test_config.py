"""Mistakes in a configuration of `vescale train`: each error names the key, its line, and how it is mended."""

import pytest

from vescale._training.config import ConfigError, read_config

GOOD = """[model]
type = "llama"
config = { vocab_size = 256 }
[data]
text = "*.txt"
tokenizer = "bytes"
[training]
steps = 10
[optimizer]
lr = 1e-3
"""
MISTAKES = {
    # the entry's name: (what is replaced, by what, the line, what the error says, the remedy)
    "a misspelt key": ("steps = 10", "step = 10", 8, "there is no training.step", "training.steps"),
    "a missing key": ("steps = 10", "", 7, "training.steps is missing", "steps = ..."),
    "a missing section": ("[training]\nsteps = 10\n", "", 1, "training is missing", "[training]"),
    "a misspelt section": ("[optimizer]", "[optimiser]", 9, "there is no optimiser", "optimizer"),
    "an unknown section": ("[optimizer]\nlr = 1e-3", "[zebra]\na = 1", 9, "there is no zebra", "..."),
    "a key of another section": ("steps = 10", "steps = 10\nlr = 1.0", 9, "there is no training.lr", "optimizer.lr"),
    "a text for a number": ("lr = 1e-3", 'lr = "1e-3"', 10, "optimizer.lr = '1e-3'", "lr = 0.1"),
    "a text for a count": ("steps = 10", 'steps = "10"', 8, "training.steps = '10'", "training.steps = 1"),
    "a fraction of a step": ("steps = 10", "steps = 1.5", 8, "training.steps = 1.5", "training.steps = 1"),
    "no steps": ("steps = 10", "steps = 0", 8, "greater than or equal to 1", "training.steps = 1"),
    "a negative rate": ("lr = 1e-3", "lr = -1.0", 10, "greater than 0", "optimizer.lr"),
    "a list for a name": ('type = "llama"', "type = [1]", 2, "model.type = [1]", "model.type"),
    "a text for a table": ("config = { vocab_size = 256 }", 'config = "x"', 3, "model.config = 'x'", "model.config"),
    "a text for a truth": ("[training]", 'documents = "yes"\n[training]', 7, "data.documents = 'yes'", "= true"),
    "an unknown schedule": ("lr = 1e-3", 'schedule = "cos"', 10, "'cosine', 'linear' or 'constant'", '"cosine"'),
    "an unknown objective": ("[training]", 'objective = "x"\n[training]', 7, "'pretraining' or 'sft'", '"pretraining"'),
    "all rows held out": ("[training]", "held_out = 1.0\n[training]", 7, "less than 1", "data.held_out"),
    "no model": ('type = "llama"', "", 1, "neither name nor type", 'type = "llama"'),
    "a function and a type": (
        'type = "llama"',
        'type = "llama"\nname = "a:b"',
        2,
        "name is a function",
        "without type",
    ),
    "no data": ('text = "*.txt"', "", 4, "[data] has none of text, rows, tokens", 'text = "folder/*.txt"'),
    "two kinds of data": ('text = "*.txt"', 'text = "*.txt"\nrows = "a"', 6, "text and rows", 'text = "folder/*.txt"'),
    "no tokenizer": ('tokenizer = "bytes"', "", 4, "data.tokenizer is missing", 'tokenizer = "bytes"'),
    "unequal parts": ("steps = 10", "steps = 10\nbatch = 7\naccumulate = 2", 10, "no 2 equal parts", "batch = 8"),
    "warmup to the end": ("lr = 1e-3", "warmup = 10", 10, "not below training.steps = 10", "warmup = 1"),
    "a plan and pins": ("[training]", '[plan]\nfile = "a"\npin = {tp=2}\n[training]', 8, "plan.pin", "without file"),
    "sft of texts": ("[training]", 'objective = "sft"\n[training]', 7, "needs rows with messages", "*.jsonl"),
    "evaluation of nothing": ("[training]", "[evaluation]\nevery = 5\n[training]", 4, "not trained on", "held_out"),
    "a zero batch": ("steps = 10", "steps = 10\nbatch = 0", 9, "greater than or equal to 1", "training.batch"),
    "a negative clip": ("lr = 1e-3", "clip = -1.0", 10, "optimizer.clip", "optimizer.clip"),
    "an integer for a file": (
        "[training]",
        "[checkpoint]\nfolder = 3\n[training]",
        8,
        "checkpoint.folder = 3",
        '"..."',
    ),
    "keep nothing": ("[training]", "[checkpoint]\nkeep = 0\n[training]", 8, "checkpoint.keep = 0", "checkpoint.keep"),
    "an unknown mode": ("[training]", '[plan]\nmode = "fast"\n[training]', 8, "'eager' or 'compile'", '"eager"'),
    "an unknown dtype": ("[training]", '[plan]\nprecision = "fp8"\n[training]', 8, "'bfloat16'", '"float32"'),
    "a dtype by another name": ("[training]", '[plan]\nprecision = "bf16"\n[training]', 8, "'bfloat16'", "precision"),
    "a log never": ("[training]", "[log]\nevery = 0\n[training]", 8, "log.every = 0", "log.every"),
    "wandb by name": ("[training]", '[log]\nwandb = "x"\n[training]', 8, "log.wandb = 'x'", "log.wandb"),
    "a flat key": ("[model]", "steps = 5\n[model]", 1, "there is no steps", "training.steps"),
    "a seed below zero": ("steps = 10", "steps = 10\nseed = -1", 9, "training.seed = -1", "training.seed"),
}


def error_of(tmp_path, text, *overrides):
    path = tmp_path / "train.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_its_key_its_line_and_a_remedy(name, tmp_path):
    before, after, line, says, remedy = MISTAKES[name]
    assert before in GOOD
    said = error_of(tmp_path, GOOD.replace(before, after, 1))
    assert says in said and remedy in said, said
    assert f"line {line}" in said, said


def test_what_is_no_toml_has_its_place(tmp_path):
    assert "line 2, column 8" in error_of(tmp_path, "[model]\ntype = llama\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none.toml")


def test_several_mistakes_are_told_at_once(tmp_path):
    said = error_of(tmp_path, GOOD.replace("steps", "step").replace("lr = 1e-3", 'lr = "x"'))
    assert "3 mistakes" in said and "line 8: there is no training.step" in said and "line 10: optimizer.lr" in said


def test_the_command_line_replaces_entries(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(GOOD)
    found = read_config(
        path, ["training.steps=5", "optimizer.schedule=linear", "plan.pin={tp = 2}", "model.config.a=1"]
    )
    assert (found.training.steps, found.optimizer.schedule, found.plan.pin) == (5, "linear", {"tp": 2})
    assert found.model.config == {"vocab_size": 256, "a": 1}
    assert "on the command line" in error_of(tmp_path, GOOD, "training.steps.a=5")
    assert "the command line: there is no training.stepz" in error_of(tmp_path, GOOD, "training.stepz=5")
    assert "is not section.key=value" in error_of(tmp_path, GOOD, "--steps")
