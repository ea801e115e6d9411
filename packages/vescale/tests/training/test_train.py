"""`vescale train` by one small configuration: the curve is one device's, wherever and however often it is started."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import vescale
from vescale._training.config import ConfigError, read_config
from vescale._training.model import build
from vescale._training.run import train
from vescale._training.script import script_of
from vescale._training.stop import Stop
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

CONFIG = """
[model]
type = "llama"
[model.config]
vocab_size = 256
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
attention_dropout = 0.2

[data]
text = "%(folder)s/*.txt"
tokenizer = "bytes"
length = 16
held_out = 0.2
cache = "%(folder)s/cache"

[training]
steps = 12
batch = 8
accumulate = 2

[optimizer]
lr = 1e-2
warmup = 2

[plan]
reproducible = true

[checkpoint]
folder = "%(folder)s/run"
every = 4

[evaluation]
every = 6
batches = 1

[log]
every = 1
"""
TEXT = "\n".join(f"{i} times {i} is {i * i}." for i in range(60))
"""Some 70 rows: an epoch ends within the training."""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "some.txt").write_text(TEXT)
    path = tmp_path / "train.toml"
    path.write_text(CONFIG % {"folder": tmp_path})
    return path


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def trained(path: Path, *overrides: str) -> bool:
    return train(read_config(path, overrides))


def stopped(path: Path, after: int, *overrides: str) -> bool:
    """Trains until the file STOP, which lies there when step `after` is told."""
    config = read_config(path, overrides)
    folder = Path(config.checkpoint.folder)
    write = vescale.JSONLines.write

    def watching(self, step):
        write(self, step)
        if step.step == after:
            (folder / "STOP").touch()

    vescale.JSONLines.write = watching
    try:
        return train(config)
    finally:
        vescale.JSONLines.write = write


def test_the_curve_is_one_devices_to_the_bit_through_stops_and_other_meshes(config, tmp_path):
    """With dropout, across the end of an epoch, and with evaluations in between."""
    assert run_ranks(1, trained, config, f'checkpoint.folder="{tmp_path}/one"') == [True]
    one = losses(tmp_path / "one")
    assert len(one) == 12 and one[-1] < one[0] - 0.5
    many = f'checkpoint.folder="{tmp_path}/many"'
    assert run_ranks(2, stopped, config, 5, many) == [False, False]
    assert 5 < vescale.latest(tmp_path / "many") < 8 and not (tmp_path / "many" / "STOP").exists()
    assert run_ranks(1, stopped, config, 9, many) == [False]
    assert run_ranks(4, trained, config, many, "plan.pin={tp=2}") == [True] * 4
    assert losses(tmp_path / "many") == one


def test_the_first_ctrl_c_asks_and_the_second_ends(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Stop(tmp_path) as stop:
        stop.ask()
        assert not stop.is_asked
        os.kill(os.getpid(), signal.SIGINT)
        stop.ask()
        assert stop.is_asked
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one was not heard")
    assert signal.getsignal(signal.SIGINT) is before


def environment(folder: Path, **more: str) -> dict[str, str]:
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{scontrol.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **more}


SLOW = """
import time
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

def model(**config):
    made, run = LlamaForCausalLM(LlamaConfig(**config, use_cache=False)), Path("run")

    def waits(*_):
        until = time.monotonic() + 300
        while (run / "metrics.jsonl").exists() and not (run / "STOP").exists() and not list(run.glob("step-*")):
            assert time.monotonic() < until, "nobody has sent the signal"
            time.sleep(0.01)

    made.register_forward_pre_hook(waits)
    return made
"""
"""A model that waits, once a step is told, for the signal that is sent; not where a checkpoint is there."""


def test_slurms_signal_saves_and_requeues_and_the_next_start_goes_on(config, tmp_path):
    """The command starts its own ranks; the signal reaches it alone, as `--signal=USR1@120` sends it to a job step."""
    (tmp_path / "slow.py").write_text(SLOW)
    slow = tmp_path / "slow.toml"
    slow.write_text(config.read_text().replace('type = "llama"', 'name = "slow:model"'))
    command = [sys.executable, "-m", "vescale", "train", str(slow), "checkpoint.every=1000"]
    slurm = environment(tmp_path, SLURM_JOB_ID="7", SLURM_PROCID="0", SLURM_STEP_NUM_NODES="1")
    running = subprocess.Popen([*command, "--ranks", "2"], env=slurm, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    told = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 300
    while not told.exists() and running.poll() is None:
        assert time.monotonic() < until, "no step within five minutes"
        time.sleep(0.05)
    running.send_signal(signal.SIGUSR1)
    said = running.communicate(timeout=300)[1]
    assert running.returncode == 0, said
    assert (tmp_path / "asked").read_text() == "requeue 7\n" and "job 7 is in the queue again" in said
    step = vescale.latest(tmp_path / "run")
    assert step is not None and 0 < step < 12 and len(losses(tmp_path / "run")) == step
    rest = [*command, "--ranks", "1"]
    rest = subprocess.run(rest, env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert rest.returncode == 0, rest.stderr
    assert f"step {step} of 12" in rest.stderr and vescale.latest(tmp_path / "run") == 12
    assert (tmp_path / "asked").read_text() == "requeue 7\n"  # it came to its end
    assert run_ranks(1, trained, config, f'checkpoint.folder="{tmp_path}/one"') == [True]
    assert losses(tmp_path / "run") == losses(tmp_path / "one")


def test_the_longest_script_is_short_and_lora_has_none(config, tmp_path):
    """Of a published model, with every entry that adds a line but the labels of a dialogue, which add one."""
    more = ["model.name=somebody/something", "data.documents=true", "checkpoint.export=out", "optimizer.clip=1.0"]
    text = script_of(read_config(config, more))
    compile(text, "script.py", "exec")
    assert len(text.splitlines()) < 79 and "snapshot_download('somebody/something')" in text
    with pytest.raises(ConfigError, match="--script has no LoRA"):
        script_of(read_config(config, ["model.lora.r=4"]))


def weights(folder: Path, config: Path) -> dict[str, torch.Tensor]:
    model = build(read_config(config).model)
    model, _ = vescale.parallelize(vescale.Plan(mesh={"dp": 1}, parameters={"*": {}}), model)
    state = {"model": model, "step": 0}
    vescale.load(folder, state, extra="ignore")
    assert state["step"] == 12
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def same_weights(*given: Path) -> bool:
    one, other = (weights(folder, given[-1]) for folder in given[:-1])
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_script_is_short_and_computes_the_same(config, tmp_path):
    text = script_of(read_config(config, ["checkpoint.folder=own"]))
    assert len(text.splitlines()) < 80 and "_training" not in text
    (tmp_path / "script.py").write_text(text)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert run_ranks(1, trained, config, f'checkpoint.folder="{tmp_path}/one"', "evaluation.every=0") == [True]
    assert len(done.stdout.splitlines()) == 12
    assert run_ranks(1, same_weights, tmp_path / "own", tmp_path / "one", config) == [True]


def exported(path: Path, folder: Path) -> list[str]:
    short = ("training.steps=3", f'checkpoint.folder="{folder}/short"', f'checkpoint.export="{folder}/out"')
    assert trained(path, *short)
    found = [one.name for one in sorted((folder / "out").iterdir())]
    (folder / "out").rename(folder / "first")  # as if it had been killed between its last save and the export
    assert trained(path, *short) and (folder / "out").is_dir()
    with pytest.raises(ConfigError, match="exists, and an export replaces nothing"):
        trained(path, *short, f'checkpoint.folder="{folder}/other"')
    assert not (folder / "other" / "metrics.jsonl").exists()  # nothing was trained
    return found


def test_a_folder_of_the_export_is_asked_for_first_and_written_if_a_run_was_killed_before(config, tmp_path):
    (found,) = run_ranks(1, exported, config, tmp_path)
    assert "model.safetensors" in found and "config.json" in found
