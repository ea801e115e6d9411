"""Steps in the memory of two nodes, which are two folders: what is whole comes back, and nothing else ever does."""

import contextlib
import logging
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_checkpoint import (
    CheckpointError,
    ConflictError,
    MismatchError,
    StorageError,
    _protect,
    close,
    latest,
    load,
    protect,
    save,
)
from vescale_checkpoint.io import _node
from vescale_checkpoint.io._commit import Root
from vescale_checkpoint.sync import _presence
from vescale_dtensor import Shard, distribute_tensor
from vescale_testkit import World, mesh_of, run_ranks

LOST = "no node that is left has all of it"


def value(step):
    return torch.arange(35.0).view(7, 5) * 10 + step


def state_at(step, ranks):
    part = distribute_tensor(value(step), mesh_of(ranks), [Shard(0)]) if ranks > 1 else value(step)
    return {"w": part, "step": step}


class Dies:
    """An object of the state, whose rank is killed when it is asked for its part."""

    def __init__(self, now):
        self.now = now

    def state_dict(self):
        if self.now():
            os.kill(os.getpid(), signal.SIGKILL)
        return {"a": 1}

    def load_state_dict(self, state):
        pass


def killed(rank, top, copies):
    """Four ranks on two nodes; the disk has step 1, memory steps 2 and 4, and rank 3 is killed when 6 is to be kept."""
    _presence.SILENT_S, _presence.BEAT_S = 4.0, 0.2
    os.environ["VESCALE_PROTECT_DIR"] = f"{top}/node-{rank // 2}"
    state = {"dies": Dies(lambda: rank == 3 and state["step"] == 6)}
    with protect(f"{top}/run", state, every=2, copies=copies) as protected:
        for step in range(1, 8):
            state |= state_at(step, 4)
            if step == 1:
                save(f"{top}/run", state)
            pending = protected.step()
            if pending is not None:
                pending.wait()


@pytest.fixture(scope="module", params=[1, 0])
def left(request, tmp_path_factory):
    """What a job that was killed has left, with a copy on the other node, and without."""
    top = tmp_path_factory.mktemp("left")
    world = World(4, killed, (top, request.param), preload=["vescale_checkpoint"])
    try:
        answers = world.answers()
    finally:
        world.close()
    assert answers[3] == ("died", -signal.SIGKILL) and answers[0][1] == "PeerError", answers
    return top, request.param


@pytest.fixture
def job(left, tmp_path, monkeypatch):
    """A copy of it, to be harmed; its folders of the nodes."""
    shutil.copytree(left[0], tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.setenv("VESCALE_PROTECT_DIR", f"{tmp_path}/node-0")
    return tmp_path, left[1], [next((tmp_path / f"node-{i}").glob("vescale-*/*/run")).parent for i in (0, 1)]


def loaded(top, nodes, goes_on):
    """What all ranks find, and what is said; rank i is on node i of those that are left."""
    os.environ["VESCALE_PROTECT_DIR"] = f"{top}/node-{nodes[dist.get_rank()]}"
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("vescale").addHandler(handler)
    try:
        state = state_at(0, len(nodes))
        if goes_on:
            protect(f"{top}/run", state)
        load(f"{top}/run", state, extra="ignore")
        whole = state["w"].full_tensor() if len(nodes) > 1 else state["w"]
        assert latest(f"{top}/run") == state["step"]
        assert torch.equal(whole, value(state["step"])), (state["step"], whole)
    finally:
        logging.getLogger("vescale").removeHandler(handler)
        os.environ.pop("VESCALE_PROTECT_DIR")
    return state["step"], said


def found(top, nodes, goes_on=False):
    """The step, and what rank 0 said; by a job that goes on, or by another program."""
    steps, said = zip(*run_ranks(len(nodes), loaded, top, nodes, goes_on))
    assert len(set(steps)) == 1 and not any(said[1:])
    return steps[0], "".join(said[0])


def names(folder):
    return sorted(path.name for path in folder.glob("step-*"))


def test_two_steps_at_most_and_each_with_as_many_files_as_there_are_copies(job):
    top, copies, nodes = job
    for node in nodes:
        assert [name for name in names(node) if ".tmp-" not in name] == ["step-00000002", "step-00000004"]
        assert len(names(node)) <= 3
        assert len([*(node / "step-00000004").glob("*.safetensors")]) == (4 if copies else 2)
        assert stat.S_IMODE(node.stat().st_mode) == stat.S_IMODE(node.parent.stat().st_mode) == 0o700
    assert names(top / "run") == ["step-00000001"]


def test_the_newest_step_comes_from_memory(job):
    top, _, _ = job
    step, said = found(top, (0, 1))
    assert step == 4 and "step 4" in said and "4 of its 4 files" in said, said
    assert names(top / "run") == ["step-00000001", "step-00000004"]


def test_a_node_that_is_lost_comes_from_its_neighbour(job):
    top, copies, nodes = job
    shutil.rmtree(nodes[1].parent)
    if not copies:
        assert found(top, (0,)) == (1, "")
    step, said = found(top, (0,), goes_on=True)
    if copies:
        assert step == 4 and "2 of its 4 files" in said and "2 from a neighbour's copy" in said, said
    else:
        assert step == 1 and said.count(LOST) == 2 and "the newest step is 1, on disk" in said, said


def test_nodes_that_are_all_lost(job):
    top, _, nodes = job
    for node in nodes:
        shutil.rmtree(node.parent)
    assert found(top, (0, 1)) == (1, "")
    step, said = found(top, (0, 1), goes_on=True)
    assert step == 1 and "lost with its nodes; the newest step is 1, on disk" in said, said


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 1)])
def test_a_harmed_file_comes_from_its_copy_and_a_step_without_one_is_none(job, harm):
    top, copies, nodes = job
    (own,) = (nodes[1] / "step-00000004").glob("00002-*.safetensors")
    harm(own)
    step, said = found(top, (0, 1))
    assert (step, "1 from a neighbour's copy" in said) == ((4, True) if copies else (2, False)), said
    if copies:
        shutil.rmtree(top / "run" / "step-00000004")
        for node in nodes:
            for path in {*(node / "step-00000004").glob("00002-*.safetensors")} - {own}:
                harm(path)
        step, said = found(top, (0, 1))
        assert step == 2 and LOST in said, said


def test_a_step_that_one_node_has_not_committed(job):
    """Its files are not counted there: a node that has all of them is needed."""
    top, copies, nodes = job
    (nodes[1] / "step-00000004").rename(nodes[1] / "step-00000004.tmp-ab")
    assert found(top, (0, 1))[0] == (4 if copies else 2)


def goes_on(top, nodes, more=3, fails=False):
    """A next attempt, in the end of which nothing is left in memory, and the newest step is on disk; or which fails."""
    os.environ["VESCALE_PROTECT_DIR"] = f"{top}/node-{nodes[dist.get_rank()]}"
    state = {"dies": Dies(lambda: False), **state_at(0, len(nodes))}
    with contextlib.suppress(KeyError), protect(f"{top}/run", state, every=2) as protected:
        load(f"{top}/run", state)
        began = state["step"]
        for step in range(began + 1, began + 1 + more):
            state |= state_at(step, len(nodes))
            protected.step()
        close()
        if fails:
            raise KeyError
    os.environ.pop("VESCALE_PROTECT_DIR")
    return began


def test_the_next_attempt_sweeps_and_leaves_nothing(job):
    top, _, nodes = job
    (nodes[0] / "step-00000006.tmp-ab").mkdir()
    assert run_ranks(3, goes_on, top, (0, 0, 1)) == [4] * 3
    assert [*(top / "node-0").iterdir()] == [*(top / "node-1").iterdir()] == []
    assert names(top / "run") == ["step-00000001", "step-00000004", "step-00000006"]


def test_a_node_that_comes_back_late_has_what_is_old(job):
    """It was away for an attempt, whose steps are newer."""
    top, _, nodes = job
    assert found(top, (0, 1))[0] == 4
    assert run_ranks(2, goes_on, top, (0, 0), more=5, fails=True) == [4] * 2
    assert names(nodes[0]) == ["step-00000006", "step-00000008"]
    assert names(nodes[1])[:2] == ["step-00000002", "step-00000004"]
    assert run_ranks(2, goes_on, top, (0, 1)) == [8] * 2
    assert names(top / "run")[-1] == "step-00000010"


# --- one process -----------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("VESCALE_PROTECT_DIR", str(tmp_path / "memory"))
    return tmp_path / "memory"


def fail_after(path, steps, **options):
    """The same state, in a model with an optimizer, after as many steps, of which the last was kept in memory."""
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}
    with pytest.raises(KeyError), protect(path, state, **options) as protected:
        for step in range(1, steps + 1):
            model(torch.ones(2, 3)).square().sum().backward()
            state["optimizer"].step()
            state["step"] = step
            protected.step()
        close()
        raise KeyError
    return state


def test_an_exception_leaves_the_step_and_load_fills_a_model(memory, tmp_path):
    wanted = fail_after(tmp_path / "run", 6, every=3)
    model = nn.Linear(3, 5)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}
    load(tmp_path / "run", state)
    assert state["step"] == 6 and torch.equal(model.weight, wanted["model"].weight)
    assert torch.equal(
        state["optimizer"].state[model.weight]["exp_avg"],
        wanted["optimizer"].state[wanted["model"].weight]["exp_avg"],
    )


def test_a_run_that_was_removed_does_not_come_back(memory, tmp_path):
    run = tmp_path / "run"
    fail_after(run, 4, every=2)
    shutil.rmtree(run)
    assert latest(run) is None
    fail_after(tmp_path / "other", 4, every=2)  # begins, and finds what nobody will ask for
    assert len([*memory.glob("vescale-*/*/run")]) == 1


def test_a_step_on_disk_that_is_newer(memory, tmp_path):
    state = fail_after(tmp_path / "run", 4, every=2)
    state["step"] = 5
    save(tmp_path / "run", state)
    assert latest(tmp_path / "run") == 5 and names(tmp_path / "run") == ["step-00000005"]


def other_process(path):
    os.environ["VESCALE_PROTECT_DIR"] = f"{path.parent}/memory"
    try:
        with pytest.raises(ConflictError, match="another process protects this run"):
            protect(path, {"step": 0})
        return latest(path)
    finally:
        os.environ.pop("VESCALE_PROTECT_DIR")


def test_others_leave_a_job_that_lives_alone(memory, tmp_path):
    """A reader beside it makes no step of what it holds; a second job is refused."""
    state = {"w": torch.ones(2), "step": 2}
    with protect(tmp_path / "run", state, every=1) as protected:
        protected.step().wait()
        assert run_ranks(1, other_process, tmp_path / "run") == [None]
        assert latest(tmp_path / "run") == 2  # its own


def test_refusals(memory, tmp_path):
    for options in ({"every": 0}, {"copies": -1}, {"every": "a"}):
        with pytest.raises(MismatchError):
            protect(tmp_path / "run", {"step": 0}, **options)
    with (
        protect(tmp_path / "run", {"w": torch.ones(2)}) as protected,
        pytest.raises(MismatchError, match="is an integer from 0"),
    ):
        protected.step()
    place = Path(_node.place())
    place.mkdir(mode=0o755, parents=True)
    place.chmod(0o755)
    with pytest.raises(StorageError, match="closed to all others"):
        protect(tmp_path / "run", {"step": 0})


@pytest.mark.parametrize("version", [1, 2])
def test_room(tmp_path, version):
    """The least of what the folder has and of what each limit leaves, in which cached files do not count as used."""
    here, top = Root(tmp_path, "protect"), tmp_path / "cgroup"
    base, own, most, used, cache = (
        (top / "memory", "3:memory,cpu:/a/b\n2:cpuset:/c\n", "limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        (top, "0::/a/b\n", "max", "current", "inactive_file"),
    )[version - 1]
    for folder, limit, current in (("", "max", 7), ("a", 1000, 900), ("a/b", 5000, 4950)):
        (base / folder).mkdir(parents=True, exist_ok=True)
        (base / folder / f"memory.{most}").write_text(f"{limit}\n")
        (base / folder / f"memory.{used}").write_text(f"{current}\n")
        (base / folder / "memory.stat").write_text(f"anon 3\n{cache} 60\n")
    (tmp_path / "own").write_text(own)
    _node.check_room(here, 110, str(top), str(tmp_path / "own"))
    with pytest.raises(StorageError, match=r"a step has 111 bytes on this node.* and 110 fit"):
        _node.check_room(here, 111, str(top), str(tmp_path / "own"))
    with pytest.raises(StorageError, match="free in"):
        _node.check_room(here, 1 << 60, str(top), str(tmp_path / "none"))


def test_steps_that_fail_in_the_background_leave_the_one_before(memory, tmp_path, monkeypatch):
    state = {"w": torch.ones(2), "step": 1}
    with pytest.raises(KeyError), protect(tmp_path / "run", state, every=1) as protected:
        protected.step().wait()

        def broken(*_):
            raise RuntimeError("connection lost")

        monkeypatch.setattr(_protect, "exchange", broken)
        for state["step"] in (2, 3, 4):
            with pytest.raises(CheckpointError, match="connection lost"):
                protected.step().wait()
        raise KeyError
    assert latest(tmp_path / "run") == 1


def test_a_step_that_does_not_fit_is_an_error_and_leaves_the_one_before(memory, tmp_path, monkeypatch):
    state = {"w": torch.ones(2), "step": 1}
    with pytest.raises(StorageError, match="no space"), protect(tmp_path / "run", state, every=1) as protected:
        protected.step().wait()

        def full(descriptor, start, nbytes):
            raise OSError(28, "no space")

        monkeypatch.setattr(os, "posix_fallocate", full)
        state["step"] = 2
        protected.step()
    monkeypatch.undo()
    monkeypatch.setenv("VESCALE_PROTECT_DIR", str(memory))
    assert latest(tmp_path / "run") == 1
