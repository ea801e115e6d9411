"""torch's distributed checkpoints: read under any mesh, and nothing in them run."""

import contextlib
import os
import pickle
import random
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from vescale_checkpoint import FormatError, MismatchError, load
from vescale_checkpoint.foreign._inert_pickle import InertError, Record, read
from vescale_dtensor import Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

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


# --- a model's names alone, and tied tensors stored twice ------------------------------------------------------------


class Two(nn.Module):
    """`kind`: two layers; or one called "model", as states call models, to whose weight the head is tied."""

    def __init__(self, kind, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.model, self.head = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        if kind == "tied":
            self.head.weight = self.model.weight


def by_one(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nobody said so
        dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.fixture
def directories(tmp_path):
    found = {}
    for kind in ("plain", "tied"):
        names = {name: value.clone() for name, value in Two(kind).state_dict().items()}
        for how, state in (("bare", names), ("under a key", {"model": names}), ("with more", {**names, "step": 3})):
            found[kind, how] = tmp_path / kind / how
            by_one(state, found[kind, how])
    return found


def whole(value):
    return getattr(value, "full_tensor", lambda: value)()


def loaded_as(path, kind, way):
    """Whether everything is as it was saved: into a model, one whose layers are sharded, or a part per rank."""
    from torch import distributed as dist

    model, wanted = Two(kind, 9), Two(kind).state_dict()
    given = model
    if way == "sharded":
        for layer in (model.model, model.head):
            weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh_of(3), [Shard(0)]))
            layer.weight = model.model.weight if kind == "tied" and layer is model.head else weight
    if way == "stages":
        name = ("model", "head")[dist.get_rank()]
        given = nn.ModuleDict({name: getattr(model, name)})
    report = load(path, {"model": given, "step": 0} if path.name == "with more" else {"model": given})
    assert not report.missing and not report.extra
    return all(torch.equal(whole(value), wanted[name]) for name, value in given.state_dict().items())


@pytest.mark.parametrize("way", ["whole", "sharded", "stages"])
def test_a_models_state_dict_loads_with_or_without_its_key(directories, way):
    for (kind, _), path in directories.items():
        ranks = {"whole": 1, "sharded": 3, "stages": 2}[way]
        if way == "stages" and kind == "tied":
            continue  # stages tie nothing between them
        assert run_ranks(ranks, loaded_as, path, kind, way) == [True] * ranks


def test_what_has_the_models_names_beside_other_keys(directories, tmp_path):
    model, state = Two("plain", 9), {"first": Two("plain", 9)}
    report = load(directories["plain", "bare"], state | {"more": 1}, missing="keep")
    assert len(report.matched) == 3 and report.missing == ("more",)
    renamed = load(
        directories["plain", "bare"], {"m": nn.ModuleDict({"top": model.head, "low": model.model})},
        rename={"head.*": "top.*", "model.*": "low.*"},
    )  # fmt: skip
    assert len(renamed.matched) == 3
    by_one(Two("plain").state_dict() | {"ema.w": torch.ones(2)}, tmp_path / "more")
    state = {"model": model, "ema": {"w": torch.zeros(2)}}
    assert not load(tmp_path / "more", state).extra and state["ema"]["w"].tolist() == [1, 1]


def test_two_values_of_what_is_tied_are_refused(directories, tmp_path):
    """On all ranks, where they differ in the part of one."""
    names = Two("tied").state_dict()
    names["head.weight"] = names["head.weight"].clone()
    names["head.weight"][4, 4] += 1
    by_one({"model": names}, tmp_path / "apart")

    def refused(way):
        with pytest.raises(MismatchError) as caught:
            loaded_as(tmp_path / "apart", "tied", way)
        return str(caught.value)

    for way, ranks in (("whole", 1), ("sharded", 3)):
        said = run_ranks(ranks, refused, way)
        assert "not in the state  model.head.weight (tied to model.model.weight there" in said[0]
        assert said[0].endswith('fix: extra="ignore"') and said == said[:1] * ranks
    model = Two("tied", 9)
    assert load(tmp_path / "apart", {"model": model}, extra="ignore").extra == ("model.head.weight",)
    assert torch.equal(model.head.weight, names["model.weight"])


@pytest.mark.parametrize("options", [{}, {"missing": "keep"}, {"missing": "keep", "extra": "ignore"}])
def test_a_load_that_would_load_nothing_is_refused_with_what_would(directories, tmp_path, options):
    """The remedy, and not an option under which nothing is loaded either."""
    from vescale_checkpoint import save

    names = Two("plain").state_dict()
    save(tmp_path / "bare", dict(names))
    save(tmp_path / "other", {"net": Two("plain")})
    for path, state, remedy in (
        (tmp_path / "bare", {"model": Two("plain", 9)}, True),
        (directories["plain", "under a key"], dict(Two("plain", 9).state_dict()), True),
        (tmp_path / "other", {"model": Two("plain", 9)}, False),
    ):
        with pytest.raises(MismatchError, match="no name is in both") as caught:
            load(path, state, **options)
        said = str(caught.value)
        assert "missing=" not in said and "3 missing" in said
        if not remedy:
            assert "the checkpoint has  net.head.weight" in said and not caught.value.remedies
            continue
        model = Two("plain", 9)
        text = {"dict(model.state_dict())": dict(model.state_dict()), '{"model": model}': {"model": model}}
        (given,) = [one for words, one in text.items() if f"load(path, {words})" in said]
        assert not load(path, given).missing
        assert all(torch.equal(value, names[name]) for name, value in model.state_dict().items())


def test_a_folder_of_weights_that_has_both_names_of_what_is_tied(tmp_path):
    from safetensors.torch import save_file

    for name, differs in (("same", False), ("apart", True)):
        (tmp_path / name).mkdir()
        weights = {key: value.clone() for key, value in Two("tied").state_dict().items()}
        weights["head.weight"][0, 0] += differs
        save_file(weights, tmp_path / name / "model.safetensors")
    assert not load(tmp_path / "same", {"model": Two("tied", 9)}).extra
    with pytest.raises(MismatchError, match=r"tied to model.model.weight there"):
        load(tmp_path / "apart", {"model": Two("tied", 9)})
