"""torch's distributed checkpoints: read under any mesh, and nothing in them run."""

import contextlib
import os
import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from vescale_checkpoint import FormatError, MismatchError, load
from vescale_checkpoint.foreign._inert_pickle import InertError, Record, read
from vescale_dtensor import Shard, distribute_tensor
from vescale_dtensor.testing import mesh_of, run_ranks

WEIGHT = torch.arange(70.0).view(10, 7)


def written(path):
    """By torch, on two ranks: sharded, uneven and replicated tensors, and plain values."""

    def run():
        mesh = init_device_mesh("cpu", (2,))
        state = {
            "model": {
                "w": torch_distribute_tensor(WEIGHT, mesh, [Shard(0)]),
                "columns": torch_distribute_tensor(WEIGHT.bfloat16(), mesh, [Shard(1)]),
                "n": torch.tensor(7),
            },
            "extra": {"lr": 0.5, "betas": (0.9, 0.99), "names": ["a", None, True]},
            "step": 12,
        }
        dcp.save(state, checkpoint_id=path)

    run_ranks(2, run)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("dcp") / "step"
    written(path)
    return path


def test_read_under_another_mesh(saved):
    def run():
        mesh = mesh_of(3)
        model = {
            "w": distribute_tensor(torch.zeros(10, 7), mesh, [Shard(1)]),
            "columns": distribute_tensor(torch.zeros(10, 7, dtype=torch.bfloat16), mesh, [Shard(0)]),
            "n": torch.tensor(0),
        }
        state = {"model": model, "extra": None, "step": 0}
        load(saved, state)
        return {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.items()}, state[
            "extra"
        ]

    for tensors, extra in run_ranks(3, run):
        assert torch.equal(tensors["w"], WEIGHT) and torch.equal(tensors["columns"], WEIGHT.bfloat16())
        assert tensors["n"] == 7 and extra == {"lr": 0.5, "betas": (0.9, 0.99), "names": ["a", None, True]}


def test_names_and_dtypes_as_for_any_checkpoint(saved):
    with pytest.raises(MismatchError, match="extra"):
        load(saved, {"model": {"w": torch.zeros(10, 7)}})
    with pytest.raises(MismatchError, match="is float64, saved as float32"):
        load(saved, {"model": {"w": torch.zeros(10, 7, dtype=torch.float64)}}, extra="ignore")


class Harm:
    def __reduce__(self):
        return (os.mkdir, ("harmed",))


def test_nothing_is_run(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.planner_data = Harm()
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RuntimeError):
        load(tmp_path / "step", {"model": {"w": torch.zeros(10, 7)}})
    (tmp_path / "step" / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(FormatError, match="where a Metadata was expected"):
        load(tmp_path / "step", {"model": nn.Linear(1, 1)})
    assert not os.path.exists("harmed")
    assert type(read(pickle.dumps(Harm()))) is Record


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_what_pickle_says(protocol):
    value = {"a": [1, -2, 3 << 40, 2.5, None, True, "text"], "b": (1, (2,), (3, 4, 5, 6)), 7: {"x": []}, "c": ()}
    assert read(pickle.dumps(value, protocol=protocol)) == value


def test_altered_metadata_end_in_a_typed_error(saved):
    """Any byte changed: an error of ours, or the same records but for a value."""
    good = (saved / ".metadata").read_bytes()
    rng = random.Random(0)
    for _ in range(400):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(InertError):
            read(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
