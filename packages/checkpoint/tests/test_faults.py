"""Fault groups 2 to 5: what the system refuses, and files that are not what was written. On two ranks."""

import contextlib
import errno
import os
import random
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vescale_checkpoint import ConflictError, CorruptError, FormatError, StorageError, close, load, save
from vescale_checkpoint._job import SaveJob
from vescale_checkpoint.io import _storage
from vescale_checkpoint.io._commit import Draft
from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_testkit import failing, intercepted, mesh_of, raises_on_all, run_ranks, short_writes

ROWS = 40_000


def value_of(step):
    return torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3) + step / 7


def state_of(step, size=2):
    mesh = mesh_of(size)
    return {
        "model": {"w": distribute_tensor(value_of(step), mesh, [Shard(0)])},
        "norm": distribute_tensor(value_of(step)[:50], mesh, [Replicate()]),
        "step": step,
    }


def save_step(path, step):
    return save(path, state_of(step)).path


def loads_exactly(path, step):
    """The latest step of `path`, which is `step`, bit for bit."""
    state = {"model": {"w": torch.zeros(ROWS, 3)}, "norm": torch.zeros(50, 3), "step": 0}
    load(path, state)
    assert state["step"] == step
    wanted = value_of(step)
    assert torch.equal(state["model"]["w"], wanted) and torch.equal(state["norm"], wanted[:50])
    assert sorted(os.listdir(path)) == [f"step-{n:08d}" for n in range(1, step + 1)]


def bounded(call, *args, **kwargs):
    """The call; whatever it raises must come within ten seconds."""
    started = time.monotonic()
    try:
        return call(*args, **kwargs)
    finally:
        assert time.monotonic() - started < 10


# --- 2. the system refuses --------------------------------------------------------

WHERE = {
    "data": ("writev", lambda args: len(args[1]) and len(args[1][0]) > 8),
    "sync": ("fsync", lambda args: True),
    "create": ("open", lambda args: str(args[0]).endswith(".safetensors")),
    "manifest": ("open", lambda args: str(args[0]).endswith("manifest.json")),
    "commit": ("rename", lambda args: True),
    "directory": ("mkdir", lambda args: True),
}


def save_where_it_fails(path, victim, where, code, asynchronous):
    name, on = WHERE[where]
    faulty = dist.get_rank() == victim
    with intercepted(_storage, failing(name, code, on)) if faulty else contextlib.nullcontext():
        bounded(lambda: save(path, state_of(2), asynchronous=asynchronous).wait())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["main", "background"])
@pytest.mark.parametrize(
    "victim, where, code",
    [
        (0, "data", errno.ENOSPC),
        (1, "data", errno.ENOSPC),
        (1, "sync", errno.EIO),
        (0, "sync", errno.EIO),
        (1, "create", errno.EDQUOT),
        (0, "manifest", errno.ENOSPC),
        (0, "commit", errno.EIO),
        (0, "directory", errno.EROFS),
    ],
)
def test_the_system_refuses(tmp_path, victim, where, code, asynchronous):
    run_ranks(2, save_step, tmp_path, 1)
    text = raises_on_all(2, StorageError, save_where_it_fails, tmp_path, victim, where, code, asynchronous)
    assert os.strerror(code) in text and str(tmp_path) in text
    if where in ("data", "sync", "create"):
        assert "cannot write" in text and "bytes" in text
    loads_exactly(tmp_path, 1)


def save_beyond_the_limit(path, victim):
    """A real refusal of the kernel: a file may not grow beyond so many bytes (EFBIG)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        bounded(save, path, state_of(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_file_that_cannot_grow(tmp_path, victim):
    run_ranks(2, save_step, tmp_path, 1)
    text = raises_on_all(2, StorageError, save_beyond_the_limit, tmp_path, victim)
    assert "File too large" in text
    loads_exactly(tmp_path, 1)


def test_short_writes_are_continued(tmp_path):
    def run():
        with intercepted(_storage, short_writes(997)):
            save(tmp_path, state_of(1))

    run_ranks(2, run)
    loads_exactly(tmp_path, 1)


def test_a_background_failure_is_raised_once_by_what_comes_next(tmp_path):
    def run(path, surface):
        with intercepted(_storage, failing("fsync", errno.EIO)):
            saving = save(path, state_of(1), asynchronous=True)
            while not saving.done:
                time.sleep(0.01)
        with pytest.raises(StorageError, match="Input/output error"):
            surface()
        close()
        save(path, state_of(1))

    def next_save():
        save(tmp_path, state_of(7))

    for name, surface in (("close", close), ("save", next_save)):
        run_ranks(2, run, tmp_path / name, surface)
        loads_exactly(tmp_path / name, 1)


def test_a_draft_taken_away_is_not_the_cause(tmp_path):
    """The rank that fails first says so before it removes the directory that another is about to write to."""

    def run(path):
        first = torch.distributed.get_rank() == 0
        discard, write = Draft.discard, SaveJob._write

        def slowly_discarded(draft):
            discard(draft)
            time.sleep(0.6)

        def slowly_written(job):
            time.sleep(0.0 if first else 0.3)
            return write(job)

        with pytest.MonkeyPatch.context() as patched, intercepted(_storage, failing("fsync", errno.EIO)):
            patched.setattr(Draft, "discard", slowly_discarded)
            patched.setattr(SaveJob, "_write", slowly_written)
            with pytest.raises(StorageError, match="Input/output error"):
                save(path, state_of(1))

    run_ranks(2, run, tmp_path)


# --- 3. and 5. files that are short, empty, missing, or of another step ------------


def first(path, step, pattern="*.safetensors"):
    return sorted((path / f"step-{step:08d}").glob(pattern))[0]


def truncate(path):
    with open(first(path, 2), "r+b") as file:
        file.truncate(1000)


def empty(path):
    first(path, 2).write_bytes(b"")


def lose(path):
    first(path, 2).unlink()


def swap(path):
    """The file of one step in the place of another's: of the same size, and full of valid checksums."""
    shutil.copy(first(path, 1), first(path, 2))


def lose_manifest(path):
    (path / "step-00000002" / "manifest.json").unlink()


def truncate_manifest(path):
    os.truncate(path / "step-00000002" / "manifest.json", 100)


def no_json(path):
    (path / "step-00000002" / "manifest.json").write_text("")


def load_untouched(path, step):
    state = state_of(5)
    before = {name: state["model"]["w"].to_local().clone() for name in state["model"]}
    try:
        bounded(load, path, state, step=step)
    except Exception:
        assert torch.equal(state["model"]["w"].to_local(), before["w"]) and state["step"] == 5
        raise


@pytest.mark.parametrize(
    "spoil, rule",
    [
        (truncate, "has 1000 bytes, and was written with"),
        (empty, "has 0 bytes, and was written with"),
        (lose, "is missing"),
        (swap, "altered, or of another checkpoint"),
        (truncate_manifest, "the manifest is not as it was written"),
        (no_json, "the manifest is not as it was written"),
    ],
)
def test_spoiled_files_are_found_before_anything_is_touched(tmp_path, spoil, rule):
    for step in (1, 2):
        run_ranks(2, save_step, tmp_path, step)
    spoil(tmp_path)
    text = raises_on_all(2, CorruptError, load_untouched, tmp_path, 2)
    assert rule in text and "step-00000002" in text
    shutil.rmtree(tmp_path / "step-00000002")
    loads_exactly(tmp_path, 1)


def test_a_step_without_manifest_is_none(tmp_path):
    for step in (1, 2):
        run_ranks(2, save_step, tmp_path, step)
    lose_manifest(tmp_path)
    text = raises_on_all(2, CorruptError, load_untouched, tmp_path, 2)
    assert "step 2 is not committed: its manifest is missing" in text
    with pytest.raises(CorruptError, match="the manifest is missing"):
        load(tmp_path / "step-00000002", {"step": 0})
    with pytest.raises(CorruptError, match="step 2 is the latest, and its manifest is missing"):
        load(tmp_path, {"step": 0}, only="step")
    state = {"step": 0}
    load(tmp_path, state, only="step", step=1)
    assert state["step"] == 1
    text = raises_on_all(2, ConflictError, save_step, tmp_path, 2)
    assert "step 2 is not committed, and something else has its name" in text
    state["step"] = None
    assert save(tmp_path, state).path.endswith("step-00000003")  # a number that nothing has
    run_ranks(2, lambda: save(tmp_path, state_of(2), overwrite=True))
    assert sorted(os.listdir(tmp_path)) == [f"step-{n:08d}" for n in (1, 2, 3)]
    state = {"step": 0}
    load(tmp_path, state, only="step", step=2)
    assert state["step"] == 2


def test_an_extra_file_harms_nothing(tmp_path):
    run_ranks(2, save_step, tmp_path, 1)
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    run_ranks(2, load_untouched, tmp_path, 1)
    run_ranks(2, save_step, tmp_path, 2)
    assert (tmp_path / "notes.txt").read_text() == "mine"


# --- 4. one flipped byte, anywhere -------------------------------------------------


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << (at % 8)
    file.write_bytes(data)


def test_one_flipped_byte_anywhere_is_found(tmp_path):
    path = Path(run_ranks(2, save_step, tmp_path, 1)[0])
    rng = random.Random(0)
    files = sorted(path.iterdir())
    places = [(file, rng.randrange(file.stat().st_size)) for file in files for _ in range(25)]
    places += [(file, at) for file in files for at in (0, 7, 8, 9, file.stat().st_size - 1)]
    for file, at in places:
        flip(file, at)
        state = {"model": {"w": torch.zeros(ROWS, 3)}, "norm": torch.zeros(50, 3), "step": 0}
        with pytest.raises((CorruptError, FormatError)) as caught:
            load(path, state)
        if file.suffix == ".safetensors":
            assert "block" in str(caught.value) or "header" in str(caught.value)
        flip(file, at)
    loads_exactly(tmp_path, 1)


def test_a_flipped_byte_of_one_rank_is_raised_by_all(tmp_path):
    path = Path(run_ranks(2, save_step, tmp_path, 1)[0])
    file = sorted(path.glob("*.safetensors"))[1]
    flip(file, file.stat().st_size - 5)
    text = raises_on_all(2, CorruptError, lambda: bounded(load, path, state_of(3)))
    assert "block 3 of 'model.w' is not as it was written" in text and file.name in text
    flip(file, file.stat().st_size - 5)
    loads_exactly(tmp_path, 1)


def spoilt_at_the_end(path):
    """A step of 40 tensors, large and small, whose file's last byte is flipped; and a state to load it into."""
    names = {f"t{i:02d}": 400_000 if i % 4 == 0 else 10 for i in range(40)}
    made = {name: torch.full((size,), 1.0) for name, size in names.items()}
    (file,) = Path(save(path, {"model": made, "step": 1}).path).glob("*.safetensors")
    flip(file, file.stat().st_size - 1)
    return {"model": {name: torch.zeros(size) for name, size in names.items()}, "step": 0}


def test_who_has_half_a_state_is_told_which_half(tmp_path):
    state = spoilt_at_the_end(tmp_path)
    with pytest.raises(CorruptError, match='verify="first"') as caught:
        load(tmp_path, state)
    changed = {f"model.{name}" for name, tensor in state["model"].items() if tensor.any()}
    assert changed <= set(caught.value.touched) and len(changed) > 0 and state["step"] == 0
    assert len(set(caught.value.touched) - changed) <= 1  # the one that was being read
    (note,) = [note for note in caught.value.__notes__ if "partly overwritten" in note]
    assert f"{len(caught.value.touched)} of its tensors on this rank (model.t00, " in note


def test_verified_first_nothing_is_touched(tmp_path):
    state = spoilt_at_the_end(tmp_path)
    with pytest.raises(CorruptError, match="is not as it was written") as caught:
        load(tmp_path, state, verify="first")
    assert caught.value.touched == () and not any(tensor.any() for tensor in state["model"].values())
    run_ranks(2, save_step, tmp_path / "good", 1)
    raised = {"model": {"w": torch.zeros(ROWS, 3)}}
    assert load(tmp_path / "good", raised, verify="first").bytes_read >= 2 * raised["model"]["w"].nbytes
    assert torch.equal(raised["model"]["w"], value_of(1))


def test_without_verification_a_flipped_byte_is_loaded(tmp_path):
    """What the checksums are worth: the same fault, not looked for."""
    path = Path(run_ranks(2, save_step, tmp_path, 1)[0])
    file = sorted(path.glob("*.safetensors"))[1]
    flip(file, file.stat().st_size - 5)
    state = {"model": {"w": torch.zeros(ROWS, 3)}}
    load(path, state, verify=False)
    assert (state["model"]["w"] != value_of(1)).sum() == 1


def test_a_committed_step_is_not_replaced_unasked(tmp_path):
    run_ranks(2, save_step, tmp_path, 1)
    assert "step 1 is committed already" in raises_on_all(2, ConflictError, save_step, tmp_path, 1)
    loads_exactly(tmp_path, 1)
