"""HuggingFace folders without transformers: read straight into shards, written, refused where they lie."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vescale_checkpoint import ConflictError, FormatError, MismatchError, export_huggingface, load, whole_state_dict
from vescale_dtensor import DTensor, RaggedShard, Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, raises_on_all, run_ranks


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.mid = nn.Embedding(12, 6), nn.Linear(6, 9)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight


PLACEMENTS = {
    "embed.weight": [Replicate(), Shard(0)],
    "mid.weight": [RaggedShard((0, 1), (20, 7)), Shard(1)],
    "mid.bias": [Shard(0), Replicate()],
}


def sharded(seed=0):
    model, mesh = Net(seed), mesh_of(2, 2)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        shard = nn.Parameter(distribute_tensor(parameter.detach(), mesh, PLACEMENTS[name]))
        setattr(model.get_submodule(owner), leaf, shard)
    model.head.weight = model.embed.weight
    return model


def whole_of_sharded():
    found = whole_state_dict(sharded(3))
    return found and (found, found["head.weight"] is found["embed.weight"])


def test_a_whole_state_is_the_first_ranks():
    (found, tied), *others = run_ranks(4, whole_of_sharded)
    wanted = Net(3).state_dict()
    assert list(found) == list(wanted) and tied and others == [{}, {}, {}]
    assert all(type(value) is torch.Tensor and torch.equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.parametrize("shards", [1, 2])
def test_in_and_out(tmp_path, shards):
    weights = {name: value for name, value in Net(3).state_dict().items() if name != "head.weight"}
    source = tmp_path / "source"
    source.mkdir()
    if shards == 1:
        save_file(weights, source / "model.safetensors")
    else:
        parts = {"a.safetensors": ["mid.weight"], "b.safetensors": ["embed.weight", "mid.bias"]}
        for file, names in parts.items():
            save_file({name: weights[name] for name in names}, source / file)
        index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))

    def run():
        model = sharded(9)
        report = load(source, {"model": model})
        export_huggingface(tmp_path / "out", model, shard_bytes=300 if shards == 2 else 1 << 30)
        return {name: value.full_tensor() for name, value in model.state_dict().items()}, report.matched

    for values, matched in run_ranks(4, run):
        assert set(matched) == {f"model.{name}" for name in weights}
        assert all(torch.equal(values[name], weights[name]) for name in weights)
        assert torch.equal(values["head.weight"], weights["embed.weight"])
    written = {
        name: value for file in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(file).items()
    }
    assert set(written) == set(weights) and all(torch.equal(written[name], weights[name]) for name in weights)
    if shards == 2:
        assert set(json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]) == set(
            weights
        )
    text = raises_on_all(4, ConflictError, lambda: export_huggingface(tmp_path / "out", sharded()))
    assert "the folder exists" in text


def test_dtypes_and_names_as_for_any_checkpoint(tmp_path):
    save_file({"layer.weight": torch.randn(2, 3).bfloat16()}, tmp_path / "model.safetensors")
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    with pytest.raises(MismatchError, match="rename="):
        load(tmp_path, {"model": model})
    with pytest.raises(MismatchError, match="saved as bfloat16"):
        load(tmp_path, {"model": model}, rename={"layer.*": "0.*"})
    load(tmp_path, {"model": model}, rename={"layer.*": "0.*"}, cast="lossless")
    assert torch.equal(model[0].weight.bfloat16(), load_file(tmp_path / "model.safetensors")["layer.weight"])
    with pytest.raises(FormatError, match="holds one model, and the state has 2"):
        load(tmp_path, {"model": model, "ema": model})


def header(fields, length=None):
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        header({}, 10 << 30),
        header({"0.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}),
        header({"0.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [-24, 0]}}),
        header({"0.weight": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4]}}) + b"....",
        header({"0.weight": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]}}) + b"....",
        header({"0.weight": []}),
        header([1, 2]),
    ],
)
def test_folders_that_lie(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    before = model[0].weight.clone()
    with pytest.raises(RuntimeError) as caught:
        load(tmp_path, {"model": model})
    assert type(caught.value).__name__ in ("FormatError", "StorageError") and torch.equal(model[0].weight, before)


def test_an_index_that_leads_elsewhere(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(FormatError, match="is not the name of a file in this directory"):
        load(tmp_path, {"model": nn.Linear(1, 1)})


def test_loading_needs_little_memory_beside_the_shard(tmp_path):
    """256 MiB of weights into the half of one of two ranks: at most 64 MiB beside it."""
    rows = 1 << 16
    save_file({"weight": torch.ones(rows, 1024)}, tmp_path / "model.safetensors")

    def run():
        model = nn.Linear(1, 1, bias=False)
        local = torch.zeros(rows // 2, 1024)
        model.weight = nn.Parameter(DTensor.from_local(local, mesh_of(2), [Shard(0)], shape=(rows, 1024)))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak from here on
        before = peak()
        load(tmp_path, {"model": model})
        assert bool((local == 1).all())
        return peak() - before

    assert max(run_ranks(2, run, timeout=120)) < 64 << 20


def peak():
    """The most memory this process has had, in bytes."""
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


class Written:
    """What transformers has: an object that writes a file of its own into a folder."""

    def __init__(self, name, fields):
        self.name, self.fields = name, fields

    def save_pretrained(self, folder):
        with open(f"{folder}/{self.name}", "w") as file:
            json.dump(self.fields, file)


def test_one_call_writes_all_that_the_hub_takes(tmp_path):
    """Weights, index, config with the model's class, what it generates by, and a tokenizer; committed by one rename."""

    def run():
        model = sharded()
        model.config = Written("config.json", {"model_type": "net"})
        model.generation_config = Written("generation_config.json", {"top_k": 5})
        tokenizer = Written("tokenizer.json", {"version": 1})
        export_huggingface(tmp_path / "out", model, also=[tokenizer], shard_bytes=300)

    run_ranks(4, run)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "net", "architectures": ["Net"]}
    model = Net(5)
    load(tmp_path / "out", {"model": model})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), Net(0).parameters()))


def test_a_peft_adapters_folder(tmp_path):
    weights = {"base.lora_A.weight": torch.randn(2, 3), "base.lora_B.weight": torch.randn(3, 2)}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    model = nn.ModuleDict({"base": nn.ModuleDict({"rest": nn.Linear(3, 3)})})
    for name, (a, b) in {"lora_A": (3, 2), "lora_B": (2, 3)}.items():
        model["base"][name] = nn.ModuleDict({"default": nn.Linear(a, b, bias=False)})
    names = {f"base.{part}.weight": f"base.{part}.default.weight" for part in ("lora_A", "lora_B")}
    report = load(tmp_path, {"model": model}, rename=names, missing="keep")
    assert set(report.missing) == {"model.base.rest.weight", "model.base.rest.bias"}
    assert all(torch.equal(model.get_parameter(names[name]), value) for name, value in weights.items())


@pytest.mark.parametrize("spans", [((0, 24), (12, 36)), ((0, 24), (28, 40)), ((4, 28), (28, 40))])
def test_tensors_that_overlap_or_leave_holes(tmp_path, spans):
    fields = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": span}
        for name, shape, span in zip(("0.weight", "0.bias"), ([2, 3], [3]), spans)
    }
    (tmp_path / "model.safetensors").write_bytes(header(fields) + bytes(40))
    with pytest.raises(FormatError, match=r"overlap|leave a hole"):
        load(tmp_path, {"model": nn.Linear(1, 1)}, missing="keep", extra="ignore")
