"""Checkpoints in an object store: fsspec's own S3 client against moto's server, on several ranks."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch

from vescale_checkpoint import CheckpointError, load, save
from vescale_dtensor import Shard, distribute_tensor
from vescale_testkit import free_port, mesh_of, run_ranks

DEADLINE_S = 60


def whole(step):
    return torch.randn(13, 7, generator=torch.Generator().manual_seed(step))


def saved(path, step, size):
    weight = distribute_tensor(whole(step), mesh_of(size), [Shard(0)])
    save(path, {"model": {"weight": weight, "small": torch.arange(3)}, "step": step})


def loaded(path, size):
    weight = distribute_tensor(torch.zeros(13, 7), mesh_of(size), [Shard(1)])
    state = {"model": {"weight": weight, "small": torch.zeros(3, dtype=torch.int64)}, "step": None}
    load(path, state)
    return state["step"], weight.full_tensor(), state["model"]["small"]


def test_in_memory_of_one_process():
    import fsspec

    url = "memory://vescale-test/run"
    for step in (1, 2):
        save(url, {"weight": whole(step), "step": step})
    state = {"weight": torch.zeros(13, 7), "step": None}
    load(url, state)
    assert state["step"] == 2 and torch.equal(state["weight"], whole(2))
    files = fsspec.filesystem("memory")
    shards = [name for name in files.find("vescale-test/run") if name.endswith(".safetensors")]
    for name in shards:  # a flipped byte of the values is found, in whatever store
        data = bytearray(files.cat_file(name))
        data[-1] ^= 1
        files.pipe_file(name, bytes(data))
    with pytest.raises(CheckpointError):
        load(url, {"weight": torch.zeros(13, 7), "step": None})


@pytest.fixture
def bucket():
    """The URL of an empty bucket of a server that lives as long as the test; skips where moto or s3fs is missing."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    port = free_port()
    where = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + DEADLINE_S
        while True:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            assert server.poll() is None and time.monotonic() < end, "moto's server did not begin to listen"
            time.sleep(0.1)
        yield where
    finally:
        server.kill()
        server.wait()


def with_endpoint(where, function, *args):
    """Runs on a rank that finds the server as a user's would: by environment variables."""
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_ENDPOINT_URL": where}
    os.environ.update(keys, AWS_DEFAULT_REGION="us-east-1")
    return function(*args)


def make_bucket():
    import fsspec

    fsspec.filesystem("s3").mkdir("runs")


def drop_manifest():
    import fsspec

    files = fsspec.filesystem("s3")
    (manifest,) = [name for name in files.find("runs/gpt") if name.endswith("manifest.json") and "2" in name]
    files.rm(manifest)


def test_in_s3_on_several_ranks(bucket):
    run_ranks(1, with_endpoint, bucket, make_bucket)
    for step in (1, 2):
        run_ranks(2, with_endpoint, bucket, saved, "s3://runs/gpt", step, 2)
    for step, weight, small in run_ranks(3, with_endpoint, bucket, loaded, "s3://runs/gpt", 3):
        assert step == 2 and torch.equal(weight, whole(2)) and torch.equal(small, torch.arange(3))
    run_ranks(1, with_endpoint, bucket, drop_manifest)  # as a save that was killed leaves it: not committed
    for step, weight, _ in run_ranks(2, with_endpoint, bucket, loaded, "s3://runs/gpt", 2):
        assert step == 1 and torch.equal(weight, whole(1))


# --- what only one rank sees ---------------------------------------------------------


def told(call):
    try:
        call()
    except CheckpointError as error:
        return type(error).__name__, str(error).partition("\n")[0], error.remedies[0][0]
    return None


def in_memory(path, large):
    """Where both ranks write, and where all that there is is rank 0's to write."""
    weight = distribute_tensor(whole(1), mesh_of(2), [Shard(0)]) if large else torch.ones(1)
    return told(lambda: save(path, {"weight": weight, "step": 1}))


@pytest.mark.parametrize("large", [True, False])
def test_a_save_where_each_rank_has_a_store_of_its_own_is_refused(large):
    said = ("StorageError", "save: rank 1 does not see the directory that rank 0 created")
    assert (
        run_ranks(2, in_memory, f"memory://apart/{large}", large)
        == [(*said, "use a file system that all ranks share")] * 2
    )


def in_own_stores(path, step, remains):
    """Rank 0 alone has a step; the other has nothing, or the directory of one."""
    import fsspec
    from torch import distributed as dist

    files = fsspec.filesystem("memory")
    if dist.get_rank() == 0:
        files.pipe_file(f"{path[9:]}/step-00000001/manifest.json", (step / "manifest.json").read_bytes())
    elif remains:
        files.pipe_file(f"{path[9:]}/step-00000001/other", b"")
    return told(lambda: load(path, {"x": torch.zeros(2)}))


@pytest.mark.parametrize("remains", [True, False])
def test_a_load_of_what_rank_0_alone_sees_is_refused(tmp_path, remains):
    step = tmp_path / "run" / "step-00000001"
    save(tmp_path / "run", {"x": torch.ones(2), "step": 1})
    said = ("StorageError", "load: rank 1 does not see the checkpoint that rank 0 sees")
    found = run_ranks(2, in_own_stores, f"memory://own/{remains}", step, remains)
    assert found == [(*said, "use a file system that all ranks share")] * 2


def test_no_mark_is_left():
    """In a store that ranks share, here threads of one process."""
    import fsspec

    from vescale_checkpoint.io._commit import Root

    for commits in (True, False):
        root = Root(f"memory://marks/{commits}", "save")
        draft = root.begin(4, False)
        draft.mark()
        other = Root(f"memory://marks/{commits}", "save")
        assert other.sees(draft.name, draft.identity) and not other.sees(draft.name, "0" * 16)
        draft.commit(b"{}") if commits else draft.discard()
        left = [name.rpartition("/")[2] for name in fsspec.filesystem("memory").find(f"marks/{commits}")]
        assert left == (["manifest.json"] if commits else [])
