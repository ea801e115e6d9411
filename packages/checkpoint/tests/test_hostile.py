"""Fault groups 10 to 12: paths, files made to harm, and versions. In one process, nothing but the package's reader."""

import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vescale_checkpoint import (
    CheckpointError,
    CorruptError,
    FormatError,
    StorageError,
    UnsafeError,
    load,
    manifest,
    save,
)
from vescale_dtensor import Partial, distribute_tensor
from vescale_testkit import mesh_of, raises_on_all, run_ranks

GOLDEN = Path(__file__).parent / "golden"
NOBODY = 65534


@pytest.fixture
def step(tmp_path):
    """The directory of a small committed step."""
    return Path(save(tmp_path / "run", {"w": torch.arange(600.0).view(20, 30), "v": torch.ones(3), "step": 1}).path)


def state():
    return {"w": torch.zeros(20, 30), "v": torch.zeros(3), "step": 0}


def fields_of(step):
    return json.loads((step / "manifest.json").read_text())


def write(step, fields):
    """A manifest of these fields with a right checksum: a liar, not an accident."""
    fields.pop("checksum", None)
    body = json.dumps(fields).encode()[:-1]
    (step / "manifest.json").write_bytes(body + (manifest._TAIL % crc32c(body)).encode())


# --- 10. paths --------------------------------------------------------------------


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("mine")
    assert "Not a directory" in raises_on_all(2, StorageError, lambda: load(tmp_path / "run", state()))
    text = raises_on_all(2, StorageError, lambda: save(tmp_path / "run", {"step": 1}))
    assert "cannot make the directory" in text and str(tmp_path / "run") in text
    assert (tmp_path / "run").read_text() == "mine"


def test_a_path_that_is_not_there(tmp_path):
    assert "it does not exist" in raises_on_all(2, StorageError, lambda: load(tmp_path / "run", state()))


def as_nobody(path, call):
    """Runs `call` in a child without root's rights; prints the error's type and text."""
    program = (
        f"import os, torch\nfrom vescale_checkpoint import load, save\nos.setgid({NOBODY}), os.setuid({NOBODY})\n"
        f"path = {os.fspath(path)!r}\n"
        f"try:\n    {call}\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    return run.stdout + run.stderr


def can_become_nobody():
    """Root can, unless it is root of a user namespace (a sandbox) that has no such user."""
    ranges = (map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return os.getuid() == 0 and any(first <= NOBODY < first + count for first, _, count in ranges)


@pytest.mark.skipif(not can_become_nobody(), reason="only root can stop being root")
def test_paths_without_permission(step):
    root = step.parent
    for folder in [root, *list(root.parents)[:3]]:
        folder.chmod(0o755)
    (first,) = step.glob("*.safetensors")
    first.chmod(0)
    said = as_nobody(root, "load(path, {'w': torch.zeros(20, 30)})")
    assert said.startswith("StorageError") and "cannot open the file: Permission denied" in said, said
    said = as_nobody(root, "save(path, {'step': 2})")
    assert said.startswith("StorageError") and "cannot make the directory: Permission denied" in said, said
    assert os.listdir(root) == ["step-00000001"]


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "a/b", "..", "", "manifest.json", "a\0b", "c:d"])
def test_a_manifest_that_names_files_elsewhere(step, name):
    fields = fields_of(step)
    (old,) = fields["files"]
    text = json.dumps(fields).replace(json.dumps(old), json.dumps(name))
    write(step, json.loads(text))
    with pytest.raises(FormatError, match="is not the name of a file in this directory"):
        load(step, state())


def test_a_data_file_that_is_a_link(step, tmp_path):
    (file,) = step.glob("*.safetensors")
    shutil.move(file, tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match="cannot open the file"):
        load(step, state())


def test_a_data_file_that_is_a_pipe_does_not_hang(step):
    (file,) = step.glob("*.safetensors")
    file.unlink()
    file.mkdir()
    with pytest.raises(StorageError):
        load(step, state())


# --- 11. made to harm -------------------------------------------------------------


class Harm:
    def __reduce__(self):
        return (os.mkdir, ("harmed",))


def test_no_pickle_is_ever_read(step, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in step.iterdir():
        good = file.read_bytes()
        file.write_bytes(pickle.dumps(Harm()))
        with pytest.raises(CheckpointError):
            load(step, state())
        file.write_bytes(good)
    assert not os.path.exists("harmed")


def test_neither_path_imports_pickle():
    """Not one module of this package, and none of what it calls on either path: pickle is made unusable first."""
    program = (
        "import torch, torch._dynamo, tempfile, pickle, vescale_checkpoint as c\n"
        "def no(*a, **k): raise SystemExit('pickle was used')\n"
        "pickle.load = pickle.loads = pickle.dump = pickle.dumps = pickle.Pickler = pickle.Unpickler = no\n"
        "torch.load = torch.save = no\n"
        "m = torch.nn.Linear(2, 2); o = torch.optim.AdamW(m.parameters())\n"
        "m(torch.ones(2)).sum().backward(); o.step()\n"
        "d = tempfile.mkdtemp(); s = {'model': m, 'optimizer': o, 'rng': torch.get_rng_state(), 'step': 1}\n"
        "c.save(d, s); c.load(d, s); print('fine')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    assert run.stdout == "fine\n", run.stdout + run.stderr
    source = Path(manifest.__file__).parent
    names = [path for path in source.rglob("*.py") if "import pickle" in path.read_text()]
    assert names == []


def bounded(call, seconds=10.0, most=512 << 20):
    """The call; within so many seconds, and so many bytes of additional memory (a limit of the kernel)."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + most, limits[1]))
    started = time.monotonic()
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        assert time.monotonic() - started < seconds


def test_a_huge_manifest_is_not_read(step):
    os.truncate(step / "manifest.json", 10 << 30)
    with pytest.raises(StorageError, match="the file has 10737418240 bytes, more than"):
        bounded(lambda: load(step, state()))


def test_a_huge_header_is_not_believed(step):
    (file,) = step.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[:8] = struct.pack("<Q", 10 << 30)
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="the header of"):
        bounded(lambda: load(step, state()))
    fields = fields_of(step)
    fields["files"][file.name][1] = 10 << 30
    write(step, fields)
    with pytest.raises(FormatError):
        bounded(lambda: load(step, state()))


def test_a_billion_entries(step):
    fields = fields_of(step)
    fields["tensors"]["w"]["shape"] = [10**9, 10**9]
    write(step, fields)
    with pytest.raises(FormatError, match="its boxes hold 600 elements of 1000000000000000000"):
        bounded(lambda: load(step, state()))
    fields["tensors"]["w"]["shape"] = [1] * 100_000
    write(step, fields)
    with pytest.raises(FormatError, match="has 100000 dims"):
        bounded(lambda: load(step, state()))


def test_many_sections_that_form_no_grid(step):
    """What would take n^2 comparisons is refused, not compared."""
    fields = fields_of(step)
    name, start, *_ = fields["tensors"]["w"]["sections"][0][1:]
    count = 20_000
    boxes = [[[i % 7, i % 7 + 2 + i % 5], [0, 1 + i % 2]] for i in range(count)]
    size = sum((a[1] - a[0]) * (b[1] - b[0]) for a, b in boxes)
    fields["tensors"]["w"] |= {
        "shape": [1, size] if size % 30 else [30, size // 30],
        "sections": [[box, name, start, start, ""] for box in boxes],
    }
    write(step, fields)
    with pytest.raises(FormatError):
        bounded(lambda: load(step, state()))


def edit(fields, path, value):
    for key in path[:-1]:
        fields = fields[key]
    fields[path[-1]] = value


@pytest.mark.parametrize(
    "path, value, rule",
    [
        (["tensors", "w", "sections", 0, 2], -8, "which are not in the file"),
        (["tensors", "w", "sections", 0, 3], 1 << 62, "which are not in the file"),
        (["tensors", "w", "sections", 0, 0, 0], [-1, 20], "does not lie in the shape"),
        (["tensors", "w", "sections", 0, 0, 0], [20, 0], "does not lie in the shape"),
        (["tensors", "w", "sections", 0, 4], "zz", "another number of checksums"),
        (["tensors", "w", "sections"], [], "its boxes hold 0 elements of 600"),
        (["tensors", "w", "dtype"], "object", "unknown dtype"),
        (["tensors", "w", "dtype"], "float64", "bytes for the box"),
        (["tensors", "w", "shape"], [20, 30.0], "is not a size"),
        (["tensors", "w", "shape"], [True, 30], "is not a size"),
        (["block_bytes"], 0, "block_bytes is 0"),
        (["block_bytes"], -1, "is not a size"),
        (["version"], [1], "not enough values"),
        (["version"], [2, 0], r"upgrade to >= 2\.0"),
        (["files"], [], "is no object"),
        (["tensors"], None, "is no object"),
        (["step"], "one", "is not a size"),
        (["format"], "other", "is not a manifest of format"),
    ],
)
def test_manifests_that_lie(step, path, value, rule):
    fields = fields_of(step)
    edit(fields, path, value)
    write(step, fields)
    with pytest.raises(FormatError, match=rule):
        load(step, state())


def test_sections_that_overlap(step):
    fields = fields_of(step)
    v, w = fields["tensors"]["v"]["sections"][0], fields["tensors"]["w"]["sections"][0]
    v[2:4] = [w[2], w[2] + 12]
    write(step, fields)
    with pytest.raises(FormatError, match=r"overlap at byte|belong to no tensor"):
        load(step, state())


def test_deep_nesting_is_no_recursion(step):
    (step / "manifest.json").write_bytes(b'{"format":' + b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(CorruptError):
        load(step, state())
    body = b'{"format":' + b"[" * 100_000 + b"]" * 100_000
    (step / "manifest.json").write_bytes(body + (manifest._TAIL % crc32c(body)).encode())
    with pytest.raises(FormatError, match="not JSON that this reader accepts"):
        load(step, state())


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_manifests(step, data):
    """Junk in one to three places: a typed error, or the manifest is still a whole one and loads what it says."""
    fields = fields_of(step)
    fields.pop("checksum")
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([p for p in places(fields) if p]))
        edit(fields, path, data.draw(JUNK))
    good = (step / "manifest.json").read_bytes()
    try:
        body = json.dumps(fields, allow_nan=True).encode()[:-1]
        (step / "manifest.json").write_bytes(body + (manifest._TAIL % crc32c(body)).encode())
        loaded = state()
        bounded(lambda: load(step, loaded))
        assert torch.equal(loaded["w"], torch.arange(600.0).view(20, 30)) and torch.equal(loaded["v"], torch.ones(3))
    except CheckpointError:
        pass
    finally:
        (step / "manifest.json").write_bytes(good)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=400))
def test_fuzzed_bytes(data):
    with pytest.raises((CorruptError, FormatError)):
        manifest.parse(data, "somewhere")
    body = b'{"format":"vescale-checkpoint"' + data
    with pytest.raises((CorruptError, FormatError)):
        manifest.parse(body + (manifest._TAIL % crc32c(body)).encode(), "somewhere")


# --- what cannot be stored --------------------------------------------------------


class Thing:
    pass


@pytest.mark.parametrize("value", [Thing(), {1, 2}, lambda: 0, complex(1, 2), [Thing()], {"a": {"b": Thing()}}])
def test_what_cannot_be_stored_is_an_error_when_it_is_saved(tmp_path, value):
    with pytest.raises(UnsafeError, match="cannot be stored without pickle"):
        save(tmp_path, {"loader": value, "step": 1})
    assert not os.path.exists(tmp_path / "step-00000001")


def test_sparse_tensors_and_pending_sums(tmp_path):
    with pytest.raises(UnsafeError, match="which the format cannot hold"):
        save(tmp_path, {"x": torch.eye(3).to_sparse()})

    def run():
        save(tmp_path, {"x": distribute_tensor(torch.ones(4), mesh_of(2), [Partial()])})

    assert "not reduced yet" in raises_on_all(2, UnsafeError, run)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_disagree_on_a_plain_tensor_or_value(tmp_path):
    def tensors():
        rank = torch.distributed.get_rank()
        save(tmp_path, {"x": torch.full((3,), float(rank // 2)), "step": 1})

    assert "'x' is not the same on all ranks" in raises_on_all(4, CheckpointError, tensors)

    def values():
        save(tmp_path, {"deep": {"seed": torch.distributed.get_rank()}, "step": 1})

    assert "'deep.seed' is not the same on all ranks" in raises_on_all(2, CheckpointError, values)
    assert list(tmp_path.iterdir()) == []


def test_different_tensors_on_different_ranks(tmp_path):
    """As under pipeline stages: each rank has its own names, and the checkpoint has them all."""

    def run(part):
        rank = torch.distributed.get_rank()
        tensors = {f"stage{rank}": torch.full((5,), float(rank)), "shared": torch.arange(4.0)}
        if part == "save":
            save(tmp_path, {"model": tensors, "step": 3})
            return None
        there = {name: torch.zeros_like(value) for name, value in tensors.items()}
        report = load(tmp_path, {"model": there})
        return len(report.extra), all(torch.equal(there[name], tensors[name]) for name in tensors)

    run_ranks(3, run, "save")
    assert run_ranks(3, run, "load") == [(0, True)] * 3
    whole = {f"stage{rank}": torch.zeros(5) for rank in range(3)} | {"shared": torch.zeros(4)}
    load(tmp_path, {"model": whole})
    assert [float(whole[f"stage{rank}"][0]) for rank in range(3)] == [0.0, 1.0, 2.0]


# --- 12. versions -----------------------------------------------------------------


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.iterdir()))
def test_golden_checkpoints_of_every_released_version_load(version, tmp_path):
    wanted = json.loads((GOLDEN / version / "wanted.json").read_text())
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    found = {
        "model": model,
        "optimizer": optimizer,
        "half": torch.zeros(4, dtype=torch.bfloat16),
        "step": 0,
        "notes": 0,
    }
    # A copy: what Bazel gives a test are links, which a load refuses to follow.
    load(shutil.copytree(GOLDEN / version / "run", tmp_path / "run"), found)
    assert found["model"].weight.tolist() == wanted["weight"]
    assert optimizer.state[model.weight]["exp_avg"].tolist() == wanted["exp_avg"]
    assert found["half"].tolist() == wanted["half"] and found["step"] == wanted["step"]
    assert found["notes"] == {"tuple": (1, 2.5), 3: None}


def test_a_newer_minor_version_with_unknown_fields_loads(step):
    fields = fields_of(step)
    fields["version"], fields["novelty"] = [1, 9], {"x": 1}
    fields["tensors"]["w"]["novelty"] = True
    write(step, fields)
    there = state()
    load(step, there)
    assert there["step"] == 1
