"""What is no checkpoint of ours: `load` says which kind it is, and what it advises works."""

import os
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vescale_checkpoint import CheckpointError, StorageError, UnsafeError, load, save
from vescale_checkpoint.plan._state import contents_of


def made():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def written(folder, name, value):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


PICKLES = {
    "a file": ("ck.pt", "ck.pt", lambda state: state, "a pickle of torch.save"),
    "transformers": ("bin/pytorch_model.bin", "bin", lambda state: state, "a pickle of torch.save"),
    "lightning": ("run/last.ckpt", "run", lambda state: {"state_dict": state}, "a pickle of torch.save"),
    "deepspeed": (
        "ds/global_step10/mp_rank_00_model_states.pt", "ds", lambda state: {"module": state}, "of DeepSpeed"
    ),
    "megatron": (
        "mg/iter_0000100/mp_rank_00/model_optim_rng.pt", "mg", lambda state: {"model": state}, "of Megatron-LM"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PICKLES)
def test_pickles_are_told_and_loaded_as_advised(tmp_path, kind):
    name, given, wrap, what = PICKLES[kind]
    model, source = made(), made()
    with torch.no_grad():
        source.weight.fill_(7.0)
    state = wrap(source.state_dict())
    path = written(tmp_path, name, state)
    with pytest.raises(UnsafeError, match=what) as error:
        load(tmp_path / given, {"model": model})
    text = str(error.value)
    assert f"torch.load({str(path)!r}, weights_only=True)" in text and "no step" not in text
    read = torch.load(path, weights_only=True)
    keys = [key for key in ("module", "model", "state_dict") if key in read]
    assert all(f"[{key!r}]" in text for key in keys)
    model.load_state_dict(read[keys[0]] if keys else read)
    assert torch.equal(model.weight, source.weight)


def test_an_old_pickle_and_a_file_of_llama_cpp(tmp_path):
    torch.save(made().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafeError, match=r"a pickle of torch\.save"):
        load(tmp_path / "old.pt", {"model": made()})
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf/model-q4.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(40))
    with pytest.raises(CheckpointError, match=r"llama.cpp.*\n.*\n.*gguf_file='model-q4.gguf'"):
        load(tmp_path / "gguf", {"model": made()})


def test_a_folder_of_checkpoints_names_those_inside(tmp_path):
    source = made()
    for number in (9, 50, 100):
        (tmp_path / f"checkpoint-{number}").mkdir()
        save_file(source.state_dict(), tmp_path / f"checkpoint-{number}/model.safetensors")
    with pytest.raises(StorageError, match="inside, 3 in number") as error:
        load(tmp_path, {"model": made()})
    inner = f"{tmp_path}/checkpoint-100"
    assert f"load({inner!r}, ...)" in str(error.value)
    model = made()
    with torch.no_grad():
        model.weight.zero_()
    load(inner, {"model": model})
    assert torch.equal(model.weight, source.weight)
    save(tmp_path / "runs/first", {"model": source, "step": 3})
    with pytest.raises(StorageError, match=r"inside  first/step-00000003"):
        load(tmp_path / "runs", {"model": made()})


def test_one_file_of_safetensors_loads(tmp_path):
    source, model = made(), made()
    with torch.no_grad():
        source.weight.fill_(7.0)
    save_file(source.state_dict(), tmp_path / "some.safetensors")
    report = load(tmp_path / "some.safetensors", {"net": model})
    assert set(report.matched) == {"net.weight", "net.bias"} and torch.equal(model.weight, source.weight)


def test_what_is_not_known_is_no_step_as_before(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/read.me").write_text("PK")
    (tmp_path / "notes/code.zip").write_bytes(b"PK\x03\x04" + bytes(40))
    os.mkfifo(tmp_path / "notes/pipe")
    with pytest.raises(StorageError, match="no step is committed"):
        load(tmp_path, {"model": made()})
    with pytest.raises(StorageError, match="it does not exist"):
        load(tmp_path / "nothing", {"model": made()})


def test_a_model_in_an_object_with_a_state_names_the_parameters_of_its_optimizer():
    @dataclass
    class Training:
        model: nn.Module

        def state_dict(self):
            return self.model.state_dict()

        def load_state_dict(self, state):
            self.model.load_state_dict(state)

    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = {"training": Training(model), "optimizer": optimizer}
    assert "optimizer.state.weight.momentum_buffer" in contents_of(saved).tensors
