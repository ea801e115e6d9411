"""What stands in the place of a file: pipes, sockets, devices, links and directories. Nothing hangs, all is said.

And names made to reach a terminal: nothing of them does.
"""

import json
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vescale_checkpoint import CheckpointError, FormatError, Retention, load, manifest, save, tools
from vescale_checkpoint.io._commit import Root
from vescale_dtensor import Shard, distribute_tensor
from vescale_testkit import mesh_of, raises_on_all, run_ranks


def fifo(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        made.bind(path.name)
        os.chdir(here)


def link_to_fifo(path):
    os.mkfifo(f"{path}.pipe")
    path.symlink_to(f"{path}.pipe")


def link_to_zeros(path):
    path.symlink_to("/dev/zero")


def link_to_itself(path):
    path.symlink_to(path)


def link_to_nothing(path):
    path.symlink_to(f"{path}.gone")


SPECIAL = [fifo, listening, Path.mkdir, link_to_fifo, link_to_zeros, link_to_itself, link_to_nothing]


def bounded(call, *args, seconds=20, **kwargs):
    """The call's error; a call that hangs is left to a thread that dies with this process."""
    found = []

    def run():
        try:
            found.append(("returned", call(*args, **kwargs)))
        except BaseException as error:
            found.append(("raised", error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


def refused(call, *args, **kwargs):
    kind, what = bounded(call, *args, **kwargs)
    assert kind == "raised" and isinstance(what, CheckpointError), (kind, what)
    return what


def opened(path, step=None):
    with tools.opened(path, step) as source:
        return tools.verify(source)


def state():
    return {"w": torch.zeros(7), "step": 0}


def saved(path, step):
    return Path(save(path, {"w": torch.full((7,), float(step)), "step": step}, metrics={"loss": step}).path)


@pytest.mark.parametrize("make", SPECIAL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("which", ["manifest.json", "*.safetensors"])
def test_in_place_of_a_file_of_a_step(tmp_path, make, which):
    saved(tmp_path, 1)
    step = saved(tmp_path, 2)
    (file,) = step.glob(which)
    file.unlink()
    make(file)
    refused(load, tmp_path, state())
    refused(load, step, state())
    refused(load, tmp_path, state(), verify="first")
    kind, what = bounded(opened, tmp_path, 2)
    assert isinstance(what, CheckpointError) if kind == "raised" else what
    kind, _ = bounded(save, tmp_path, state() | {"step": 3}, metrics={"loss": 3}, retention=Retention(best="loss"))
    assert kind == "returned" and 3 in Root(tmp_path, "load").committed()
    there = state()
    assert bounded(load, tmp_path, there, step=1)[0] == "returned" and there["w"][0] == 1


@pytest.mark.parametrize("make", SPECIAL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["step-00000005", "step-00000005.tmp-0123456789abcdef", "step-00000005.old-00"])
def test_in_place_of_a_step(tmp_path, make, name):
    saved(tmp_path, 1)
    make(tmp_path / name)
    there = state()
    kind, what = bounded(load, tmp_path, there)
    assert kind == "returned" and there["step"] == 1, what
    assert bounded(saved, tmp_path, 6)[0] == "returned"
    kind, what = bounded(saved, tmp_path, 5)
    assert kind == "returned" or (isinstance(what, CheckpointError) and "step-00000005" in name), what
    assert bounded(load, tmp_path, state())[1].step == 6


@pytest.mark.parametrize("make", SPECIAL, ids=lambda make: make.__name__)
def test_in_place_of_a_run(tmp_path, make):
    path = tmp_path / "run"
    make(path)
    refused(load, path, state())
    if make is not Path.mkdir:
        refused(saved, path, 1)


FOREIGN = [".metadata", "model.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize("make", SPECIAL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", FOREIGN)
def test_in_place_of_a_file_of_a_foreign_folder(tmp_path, make, name):
    make(tmp_path / name)
    refused(load, tmp_path, {"model": nn.Linear(2, 2)})


# --- the hub's cache -------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path):
    """A model in the cache as huggingface_hub lays it out: two files of weights, links to blobs."""
    torch.manual_seed(3)
    model, root = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), tmp_path / "hub" / "models--owner--name"
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    snapshot = root / "snapshots" / "abc123"
    for folder in (root / "blobs", snapshot, root / "refs"):
        folder.mkdir(parents=True)
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    parts = {file: [f"{i}.weight", f"{i}.bias"] for i, file in enumerate(files)}
    for i, (file, names) in enumerate(parts.items()):
        save_file({name: weights[name] for name in names}, root / "blobs" / f"blob{i}")
        (snapshot / file).symlink_to(f"../../blobs/blob{i}")
    index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
    (root / "blobs" / "index").write_text(json.dumps(index))
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/index")
    (root / "refs" / "main").write_text("abc123")
    return root, snapshot, weights


def test_the_hubs_cache_straight_into_shards(cache):
    root, snapshot, weights = cache

    def run(path):
        model, mesh = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), mesh_of(2)
        for layer in model:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
        load(path, {"model": model})
        return {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}

    for path in (snapshot, root):
        for found in run_ranks(2, run, path):
            assert all(torch.equal(found[name], weights[name]) for name in weights)
    shutil.rmtree(root / "refs")
    assert len(run_ranks(2, run, root)) == 2  # one snapshot: it is meant
    (root / "snapshots" / "def456").mkdir()
    text = raises_on_all(2, FormatError, lambda: load(root, {"model": nn.Linear(1, 1)}))
    assert "which of its 2 snapshots is meant" in text and "abc123" in text


@pytest.mark.parametrize("main", ["../../..", "", "gone", "abc123/..", "\0", "x" * 300])
def test_a_cache_whose_main_leads_elsewhere(cache, main):
    root, _, _ = cache
    (root / "refs" / "main").write_text(main)
    refused(load, root, {"model": nn.Linear(1, 1)})


# --- names -------------------------------------------------------------------------------

NAMES = [
    "[/b] [bold red]", "\x1b]0;title\x07\x1b[2J", "\x9b31m", "a\u202egnp.exe", "line\nfeed", "\ud800", "\t\r", "\u2028",
]  # fmt: skip


def quiet(text):
    return text.isprintable()


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_in_errors_and_reports_have_no_control_characters(tmp_path, name):
    saved = Path(save(tmp_path / "run", {name: torch.ones(3), "x": {name: 5}, "step": 1}).path)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "run", {name: torch.ones(4), "x": {f"{name}!": 5}, "other": torch.ones(1)})
    assert all(quiet(line) for line in str(caught.value).split("\n"))
    assert "\x1b" not in repr(caught.value) and all(quiet(n) for n in getattr(caught.value, "__notes__", ()))
    state = {name: torch.zeros(3), "x": {name: 0}, "step": 0}
    load(tmp_path / "run", state)
    assert state["x"] == {name: 5} and state[name].sum() == 3  # the name is what it was
    for other in ("a", "b"):
        save(tmp_path / other, {name: torch.full((3,), float(ord(other))), "x": {name: other}, "step": 1})
    with tools.opened(tmp_path / "a") as a, tools.opened(tmp_path / "b") as b:
        assert all(quiet(line) for found in tools.diff(a, b) for line in (found.name, found.what))
    (file,) = saved.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert all(quiet(fault) for fault in opened(saved)) and len(opened(saved)) == 1
    with pytest.raises(CheckpointError) as caught:
        load(saved, {name: torch.zeros(3), "x": {name: 0}, "step": 0})
    assert all(quiet(line) for line in str(caught.value).split("\n"))
    assert all(quiet(note) for note in getattr(caught.value, "__notes__", ()))


def test_errors_have_a_bounded_length_whatever_they_quote(tmp_path):
    class Loud:
        def state_dict(self):
            raise ValueError("x" * 20_000_000)

    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    class Silent:
        def state_dict(self):
            raise Mute

    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, {"x": Loud()})
    assert len(str(caught.value)) < 10_000
    with pytest.raises(CheckpointError, match="Mute, whose text raises RuntimeError"):
        save(tmp_path, {"x": Silent()})
    names = {"y" * 3_000_000 + str(i): torch.ones(1) for i in range(3)}
    save(tmp_path, {**names, "step": 1})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, {**dict.fromkeys(names, torch.ones(2)), "step": 1})
    assert len(str(caught.value)) < 50_000
    assert manifest.NAME in os.listdir(tmp_path / "step-00000001")
