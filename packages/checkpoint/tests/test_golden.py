"""Every released format version is read: steps that were written once, by four ranks, with all that a step may hold.

`python packages/checkpoint/tests/test_golden.py` writes that of the present version, which is then committed for good.
"""

import json
import math
import shutil
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

from vescale_checkpoint import Report, load, manifest, save, tools
from vescale_dtensor import DTensor, InterleavedShard, RaggedShard, Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

GOLDEN = Path(__file__).parent / "golden"
NOW = "v{}.{}".format(*manifest.VERSION)

# Name -> (shape, dtype, placements on a mesh of (2, 2)).
TENSORS = {
    "rows": ((5, 3), torch.float32, [Shard(0), Replicate()]),
    "grid": ((6, 4), torch.bfloat16, [Shard(0), Shard(1)]),
    "packed": ((12, 2), torch.float64, [InterleavedShard(0, 3), Replicate()]),
    "flat": ((3, 5), torch.float32, [Replicate(), RaggedShard((0, 1), (11, 4))]),
    "complex": ((4,), torch.complex64, [Replicate(), Shard(0)]),
    "empty": ((0, 3), torch.int64, [Replicate(), Replicate()]),
    "scalar": ((), torch.int16, [Replicate(), Replicate()]),
    "bits": ((9,), torch.bool, [Shard(0), Replicate()]),
    "eight": ((8,), torch.float8_e4m3fn, [Shard(0), Shard(0)]),
}
VALUES = {
    "tuple": (1, (2.5, None)), 4: "int key", (5, "x"): {"deep": math.inf}, "nan": -math.inf, "counter": Counter({3: 2}),
    "bytes": b"\0\xff", "dtype": torch.bfloat16, "device": torch.device("cpu"), "big": 1 << 70, "$odd": [], "": {},
}  # fmt: skip


def value_of(name):
    shape, dtype, _ = TENSORS[name]
    return (torch.arange(prod(shape)) % 7).to(dtype).view(shape)


class Tied(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        nn.init.constant_(self.embed.weight, value)
        self.norm = nn.BatchNorm1d(4)


def state(value):
    model = Tied(value)
    optimizer = torch.optim.AdamW([{"params": [model.embed.weight], "lr": value}, {"params": model.norm.parameters()}])
    return {"model": model, "optimizer": optimizer, "values": None, "step": 0}


def write(path):
    mesh, made = mesh_of(2, 2), state(0.5)
    made["model"].head(made["model"].embed(torch.arange(5))).sum().backward()
    made["optimizer"].step()
    nn.init.constant_(made["model"].embed.weight, 0.25)
    tensors = {name: distribute_tensor(value_of(name), mesh, rows) for name, (_, _, rows) in TENSORS.items()}
    save(path, {**made, "tensors": tensors, "values": VALUES, "step": 7, "plan": "a plan"}, metrics={"loss": math.nan})


def whole(tensor):
    return tensor.full_tensor() if type(tensor) is DTensor else tensor


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.iterdir() if (path / "all").is_dir()))
def test_every_released_version_loads(version, ranks, tmp_path):
    # A copy: what Bazel gives a test are links, which a load refuses to follow.
    path = shutil.copytree(GOLDEN / version / "all", tmp_path / "run")

    def run():
        mesh, there = mesh_of(ranks), state(1.0)
        shards = [Shard(0) if shape and shape[0] else Replicate() for shape, _, _ in TENSORS.values()]
        made = zip(TENSORS, shards)
        there["tensors"] = {
            name: distribute_tensor(torch.zeros_like(value_of(name)), mesh, [shard]) for name, shard in made
        }
        report = load(path, there)
        assert type(report) is Report and not report.missing and not report.extra and there["step"] == 7
        for name, tensor in there["tensors"].items():
            found, wanted = (value.reshape(-1).view(torch.uint8) for value in (whole(tensor), value_of(name)))
            assert torch.equal(found, wanted), name
        assert repr(there["values"]) == repr(VALUES)
        assert (there["model"].embed.weight == 0.25).all() and there["model"].head.weight is there["model"].embed.weight
        assert there["optimizer"].param_groups[0]["lr"] == 0.5
        assert there["optimizer"].state[there["model"].embed.weight]["step"] == 1

    run_ranks(ranks, run)
    with tools.opened(path) as source:
        assert tools.verify(source) == [] and source.manifest.about["plan"] == "a plan"


def test_the_present_version_has_a_golden_checkpoint():
    """Whoever changes the version writes one; whoever changes what is written changes the version."""
    (path,) = (GOLDEN / NOW / "all").glob("*/manifest.json")
    assert tuple(json.loads(path.read_text())["version"]) == manifest.VERSION


def kinds(value):
    """The structure of a manifest: its fields, and the kinds of values in it."""
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    return [kinds(item) for item in value] if isinstance(value, list) else type(value).__name__


def test_what_is_written_is_what_the_present_version_says(tmp_path):
    run_ranks(4, write, tmp_path)
    (now,), (then,) = tmp_path.glob("*/manifest.json"), (GOLDEN / NOW / "all").glob("*/manifest.json")
    fields = [json.loads(path.read_text()) for path in (now, then)]
    for found in fields:
        files = {name: f"file {i}" for i, name in enumerate(sorted(found["files"]))}
        for tensor in found["tensors"].values():
            for section in tensor["sections"]:
                section[1] = files[section[1]]
        found["files"] = {files[name]: info for name, info in found["files"].items()}
        found["optimizer"] = found["values"].pop("optimizer")["$optimizer"]["state"]  # options are torch's of the day
        found["about"].pop("torch")
    assert kinds(fields[0]) == kinds(fields[1])
    assert fields[0]["tensors"].keys() == fields[1]["tensors"].keys()


if __name__ == "__main__":
    run_ranks(4, write, GOLDEN / NOW / "all")
