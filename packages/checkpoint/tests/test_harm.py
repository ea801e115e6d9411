"""Inputs made to harm, by a generator: each loads bit for bit, or is a typed error, in bounded time and memory.

Some of 4,000 of each kind; all with VESCALE_GRID=full.

A case is a checkpoint (a step of ours, a folder of safetensors, a directory of torch's DCP) and one to three changes
of it: bytes, nodes of its JSON with the checksums made right again, headers, pickles, and the tree of files.
"""

import contextlib
import json
import os
import pickle
import random
import resource
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from crc32c import crc32c
from safetensors.torch import save_file
from torch import nn

from vescale_checkpoint import CheckpointError, load, manifest, save, tools
from vescale_checkpoint.foreign._inert_pickle import _OPCODES, Budget, InertError, check_plain, read
from vescale_testkit import run_ranks, slice_of

CASES, SLICES = 4000, 20
MOST_S, MOST_BYTES = 20.0, 768 << 20
VALUES = {"w": torch.arange(600.0).view(20, 30), "v": torch.ones(3), "h": torch.arange(8).bfloat16()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in VALUES.items():
            self.register_buffer(name, torch.zeros_like(value))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """One valid checkpoint of each kind."""
    top = tmp_path_factory.mktemp("bases")
    state = {"model": VALUES, "loader": {"seen": [1, (2, 3)], 5: None}, "rate": float("inf"), "step": 3}
    save(top / "ours", state, metrics={"loss": 0.5})
    folder = top / "weights"
    folder.mkdir()
    files = {"model-00001-of-00002.safetensors": ["w"], "model-00002-of-00002.safetensors": ["v", "h"]}
    for file, names in files.items():
        save_file({name: VALUES[name] for name in names}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, names in files.items() for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    theirs = {"model": VALUES, "extra": {"lr": 0.5, "names": ["a", None]}}
    run_ranks(1, lambda: dcp.save(theirs, checkpoint_id=top / "torch") and None)
    return top


def state_for(kind):
    if kind == "ours":
        model = {name: torch.zeros_like(value) for name, value in VALUES.items()}
        return {"model": model, "loader": 0, "rate": 0, "step": 0}
    return {"model": Net()} if kind == "weights" else {"model": Net(), "extra": None}


# --- changes ---------------------------------------------------------------------------


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


JUNK = [
    lambda r: None, lambda r: r.choice([True, False]), lambda r: r.choice([-1, 0, 1, 2**31, 2**63, -(2**64), 10**300]),
    lambda r: r.choice([0.5, 1e308, -0.0]), lambda r: r.choice(["", "\x1b[2J", "[/b]", "../x", "\0", "\ud800"]),
    lambda r: [], lambda r: {}, lambda r: nested(r.choice([3, 60, 300, 900])), lambda r: {"$tensor": "model.w"},
    lambda r: {"$tuple": nested(100)}, lambda r: {"$dict": [[{"$tuple": []}, {}]]}, lambda r: {"$dict": 5},
    lambda r: {"$nothing": 1}, lambda r: [[0, 1 << 62]] * r.choice([1, 3, 70]), lambda r: {"$module": []},
    lambda r: {"$optimizer": {"state": 5}}, lambda r: {"$tensor": ["x"]}, lambda r: list(range(r.choice([1, 5000]))),
]  # fmt: skip


def nodes(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from nodes(item, (*path, key))


def holder_of(fields, path):
    for key in path[:-1]:
        fields = fields[key]
    return fields, path[-1]


def change_json(rng, fields):
    """Junk for a node, two nodes swapped, one gone, one twice."""
    paths = list(nodes(fields))
    if not paths:
        return
    holder, key = holder_of(fields, rng.choice(paths))
    how = rng.randrange(5)
    if how == 0 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif how == 1:
        del holder[key]
    elif how == 2:
        other, place = holder_of(fields, rng.choice(paths))
        with contextlib.suppress(LookupError, TypeError):
            holder[key], other[place] = other[place], holder[key]
    else:
        holder[key] = rng.choice(JUNK)(rng)


def change_bytes(rng, data):
    data = bytearray(data)
    at = rng.randrange(len(data) + 1)
    size = rng.choice([1, 1, 1, 2, 8, 100])
    how = rng.randrange(5)
    if how == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif how == 1:
        del data[at : at + size]
    elif how == 2:
        data[at:at] = rng.randbytes(size)
    elif how == 3:
        data[at:at] = data[at : at + size]
    else:
        del data[at:]
    return bytes(data)


def change_file(rng, path):
    path.write_bytes(change_bytes(rng, path.read_bytes()))


def change_manifest(rng, path):
    """A liar: the checksum is right."""
    fields = json.loads(path.read_text())
    fields.pop("checksum")
    for _ in range(rng.randint(1, 3)):
        change_json(rng, fields)
    body = json.dumps(fields).encode()[:-1]
    path.write_bytes(body + (manifest._TAIL % crc32c(body)).encode())


def change_text(rng, path):
    fields = json.loads(path.read_text())
    change_json(rng, fields)
    path.write_text(json.dumps(fields))


def change_header(rng, path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + size])
    change_json(rng, fields)
    text = json.dumps(fields).encode()
    length = rng.choice([len(text)] * 4 + [0, len(text) + 1, 1 << 40, (1 << 64) - 1])
    path.write_bytes(struct.pack("<Q", length) + text + data[8 + size :])


def bomb(rng):
    """Opcodes of a value of a few hundred bytes that is beyond any memory when it is written out."""
    levels = rng.choice([5, 60, 400])
    if rng.randrange(2):
        return b")" + b"q\xf0h\xf0\x86" * levels
    return b"(" + b"K\x05" * 50 + b"t" + (b"q\xf0(" + b"h\xf0" * 20 + b"t") * levels


def change_pickle(rng, path):
    """Opcodes put in, left out and exchanged; a bomb in the place of an operand; or nothing but random opcodes."""
    data, how = path.read_bytes(), rng.randrange(4)
    codes = list(_OPCODES)
    at = rng.randrange(2, len(data))
    if how == 0:
        data = data[:at] + b"".join(rng.choice(codes) for _ in range(rng.randint(1, 6))) + data[at:]
    elif how == 1:
        places = [i for i in range(2, len(data) - 1) if data[i : i + 1] in (b"K", b"\x8c", b")", b"]", b"N")]
        at = rng.choice(places)
        data = data[:at] + bomb(rng) + data[at:]
    elif how == 2:
        body = b"".join(rng.choice(codes) + rng.randbytes(rng.choice([0, 0, 1, 4])) for _ in range(300))
        data = b"\x80\x04" + body + b"."
    else:
        metadata = pickle.loads(data)
        names = list(metadata.state_dict_metadata)
        kept = metadata.state_dict_metadata[rng.choice(names[:3])]
        place = rng.choice(list(metadata.storage_data.values()))
        big, rng_choice = 1 << 62, rng.randrange(8)
        if rng_choice == 0 and hasattr(kept, "chunks"):
            kept.chunks = kept.chunks * rng.choice([2, 10_000])
        elif rng_choice == 1 and hasattr(kept, "size"):
            kept.size = torch.Size([rng.choice([0, 1, big])] * rng.choice([1, 2, 80]))
        elif rng_choice == 2:
            place.offset = rng.choice([-1, big, 0.5, "x", None, place.offset + 1])
        elif rng_choice == 3:
            place.length = rng.choice([-1, 0, big, "x", place.length - 1, place.length + 1])
        elif rng_choice == 4:
            place.relative_path = rng.choice(["../../etc/passwd", "", 5, None, "\0", "a" * 300, ".metadata"])
        elif rng_choice == 5:
            metadata.planner_data = {name: ("a",) * rng.choice([1, 40, 5000]) for name in names}
        elif rng_choice == 6:
            metadata.planner_data = rng.choice([None, 5, {name: nested(3) for name in names}])
        else:
            metadata.state_dict_metadata = {rng.choice([5, "x", None]): kept}
        data = pickle.dumps(metadata)
    path.write_bytes(data)


def is_small(path):
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 30


def change_tree(rng, path):
    """A file that is gone, empty, a directory, a pipe, a link, another file; a step that is called otherwise."""
    others = [other for other in path.parent.iterdir() if other != path and is_small(other)]
    how = rng.randrange(8)
    if how == 7 and path.parent.name.startswith("step-"):
        path.parent.rename(path.parent.parent / rng.choice(["step-00000009", "step-3", "step-00000003.old-00", "mine"]))
        return
    if how == 6 and others:
        other = rng.choice(others)
        data = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return
    path.unlink()
    if how == 1:
        path.touch()
    elif how == 2:
        path.mkdir()
    elif how == 3:
        os.mkfifo(path)
    elif how == 4:
        path.symlink_to(rng.choice(["/dev/zero", path.name, "nowhere", "/etc/passwd"]))
    elif how == 5:
        path.touch()
        os.truncate(path, 1 << 40)


DATA = [change_file, change_tree]
MANIFEST = [change_manifest, change_manifest, *DATA]
CHANGES = {
    "ours": {"manifest.json": MANIFEST, "*.safetensors": DATA},
    "weights": {"*.json": [change_text, *DATA], "*.safetensors": [change_header, change_header, *DATA]},
    "torch": {".metadata": [change_pickle, change_pickle, *DATA], "*.distcp": DATA},
}


def bounded(call, *args, **kwargs):
    """What the call returns, None where it is refused; within so many seconds and bytes (the kernel's limit)."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, limits[1]))
    started = time.process_time()
    try:
        return call(*args, **kwargs)
    except CheckpointError as error:
        assert len(str(error)) < 100_000 and str(error).replace("\n", "").isprintable()
        repr(error)
        return None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        assert time.process_time() - started < MOST_S


def inspected(path):
    with tools.opened(path) as source:
        tools.verify(source)
        tools.diff(source, source)


@pytest.mark.parametrize("kind", list(CHANGES))
def test_it_loads_bit_for_bit_or_is_a_typed_error(bases, tmp_path, kind):
    outcomes = {"loaded": 0, "refused": 0}
    for seed in slice_of(range(CASES), SLICES):
        rng, path = random.Random(f"{kind} {seed}"), tmp_path / f"case{seed}"
        shutil.copytree(bases / kind, path)
        changed = []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            pattern = rng.choice(list(CHANGES[kind]))
            files = [file for file in sorted(path.rglob(pattern)) if is_small(file)]
            if files:
                change = rng.choice(CHANGES[kind][pattern])
                try:
                    change(rng, rng.choice(files))
                except Exception:  # changed before, so that it is not what this change expects
                    continue
                changed.append(change.__name__)
        there = state_for(kind)
        try:
            report = bounded(load, path, there, verify=rng.choice([True, "first"]), extra="ignore")
            if kind == "ours":
                bounded(inspected, path)
        except BaseException as error:
            error.add_note(f"seed {seed} of {kind}: {changed}")
            raise
        outcomes["refused" if report is None else "loaded"] += 1
        found = there["model"].state_dict() if kind != "ours" else there["model"]
        if report is not None and kind == "ours":
            wrong = [name for name in VALUES if not torch.equal(found[name], VALUES[name])]
            assert not wrong, (seed, changed, wrong)
        shutil.rmtree(path)
    assert outcomes["refused"] and outcomes["loaded"], outcomes


# --- pickles by themselves ---------------------------------------------------------------


def test_pickles_that_expand():
    """Each of a kilobyte; as a value, as a key, as a name, in what is called, and in the error's text."""
    big = b"\x80\x04)" + b"q\x01h\x01\x86" * 200
    tails = [
        b".", b"}h\x01K\x01s.", b"}h\x01h\x01\x86K\x01s.", b")R.", b"h\x01\x93.", b"h\x01b.", b"Q.", b"}h\x01h\x01s.",
    ]  # fmt: skip
    refused = 0
    for tail in tails:
        started = time.process_time()
        try:
            check_plain(bounded(read, big + tail), Budget(items=100_000))
        except InertError as error:
            assert len(str(error)) < 1000
            refused += 1
        assert time.process_time() - started < 5
    assert refused == len(tails)


@pytest.mark.parametrize("body", [b"]\x94", b"K\x01", b"(", b")\x94", b"Na", b"h\x00a"], ids=repr)
def test_more_opcodes_than_a_checkpoint_has(body):
    with pytest.raises(InertError, match=r"opcodes|belong to nothing yet"):
        bounded(read, b"\x80\x04]\x94" + body * 2_000_000 + b".", Budget(opcodes=1_500_000))


@pytest.mark.skipif(os.environ.get("VESCALE_GRID") != "full", reason="takes half a minute: in full by make verify")
def test_20_million_opcodes():
    with pytest.raises(InertError, match="more than 8000000 opcodes"):
        bounded(read, b"\x80\x04]" + b"Na" * 10_000_000 + b".")


def test_a_deep_manifest_is_refused(tmp_path):
    """100,000 levels, in every field, and beside it a header and an index of such."""
    path = Path(save(tmp_path / "run", {"w": torch.ones(3), "step": 1}).path) / "manifest.json"
    good = json.loads(path.read_text())
    good.pop("checksum")
    for field in good:
        for levels in (300, 900, 100_000):
            text = json.dumps({**good, field: "HERE"}).replace('"HERE"', "[" * levels + "]" * levels)
            body = text.encode()[:-1]
            path.write_bytes(body + (manifest._TAIL % crc32c(body)).encode())
            with pytest.raises(CheckpointError):
                load(tmp_path / "run", {"w": torch.zeros(3), "step": 0})
            with pytest.raises(CheckpointError):
                inspected(tmp_path / "run")
