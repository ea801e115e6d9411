"""What happens at the same time: between ranks, beside a save in the background, and as the interpreter ends."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from vescale_checkpoint import CheckpointError, StorageError, load, reshard, save
from vescale_checkpoint.io import _storage
from vescale_checkpoint.io._commit import Root
from vescale_checkpoint.io._storage import LocalStorage
from vescale_checkpoint.sync import _presence, _sync
from vescale_checkpoint.sync._presence import Beat, Presence
from vescale_checkpoint.sync._sync import Session
from vescale_dtensor import Shard, distribute_tensor
from vescale_testkit import failing, in_turns, intercepted, mesh_of, raises_on_all, run_ranks


def value_of(step):
    return torch.arange(4096 * 3, dtype=torch.float32).view(4096, 3) + step / 7


def state_of(step):
    return {"w": distribute_tensor(value_of(step), mesh_of(2), [Shard(0)]), "step": step}


def check_step(path, step):
    state = {"w": torch.zeros(4096, 3), "step": 0}
    load(path, state)
    assert state["step"] == step and torch.equal(state["w"], value_of(step))


@contextlib.contextmanager
def late_answers(name, seconds):
    """This rank looks for what the others say under `name` so much later."""
    awaited = Session._awaited

    def late(session, asked, ask):
        if asked == name:
            time.sleep(seconds)
        return awaited(session, asked, ask)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "_awaited", late)
        yield


# --- the end of the interpreter, and of a process ------------------------------------

AT_EXIT = """
import os, sys, time, torch
import vescale_checkpoint, vescale_checkpoint.io._storage as storage

class Slow:
    def __getattr__(self, name):
        if name == "writev":
            ending.wait()
            time.sleep(0.3)
        return getattr(os, name)

import threading
ending = threading.Event()
threading._register_atexit(ending.set)  # not a byte is written before the interpreter begins to end
storage.os, storage.FLUSH_BYTES = Slow(), 1 << 20
vescale_checkpoint.save(sys.argv[1], {"x": torch.arange(1 << 20), "step": 1}, asynchronous=True)
"""


@in_turns(3)
def test_a_script_that_ends_right_after_an_asynchronous_save(tmp_path):
    run = subprocess.run([sys.executable, "-c", AT_EXIT, tmp_path], capture_output=True, text=True, timeout=150)
    assert run.returncode == 0 and "vescale" not in run.stderr, run.stderr
    state = {"x": torch.zeros(1 << 20, dtype=torch.int64), "step": 0}
    load(tmp_path, state)
    assert state["step"] == 1 and torch.equal(state["x"], torch.arange(1 << 20))


def end_after_saving(rank, path, asynchronous):
    """A world whose store lives in rank 0, which has nothing to do after its save; rank 1 is slow to hear of it."""
    outer = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        outer.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(outer.get("port")), None, False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with late_answers("committed", 1.5) if rank else contextlib.nullcontext():
        return save(path, state_of(1), asynchronous=asynchronous).wait()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["main", "background"])
def test_the_rank_with_the_store_ends_last(tmp_path, start_world, asynchronous):
    answers = start_world(2, end_after_saving, tmp_path, asynchronous).answers()
    assert [answer[0] for answer in answers] == ["returned", "returned"], answers
    check_step(tmp_path, 1)


# --- the caller, beside a save in the background --------------------------------------


def test_resharding_beside_a_save_in_the_background(tmp_path):
    """Keys of the save must not be taken for those of a session that is over while one rank still waits for them."""

    def run():
        with late_answers("committed", 1.0) if dist.get_rank() else contextlib.nullcontext():
            saving = save(tmp_path, state_of(1), asynchronous=True)
            target = state_of(2)
            for _ in range(2):
                reshard(state_of(3), target)
            assert torch.equal(target["w"].full_tensor(), value_of(3))
            saving.wait()

    run_ranks(2, run, timeout=60)
    check_step(tmp_path, 1)


def test_values_change_as_soon_as_an_asynchronous_save_returns(tmp_path):
    def run():
        state = {**state_of(1), "notes": [1, {"deep": 2}]}
        with intercepted(_storage, slowly("writev")):
            saving = save(tmp_path, state, asynchronous=True)
            state["w"].to_local().zero_()
            state["notes"][1]["deep"] = state["step"] = 9
            saving.wait()

    run_ranks(2, run)
    state = {"w": torch.zeros(4096, 3), "step": 0, "notes": None}
    load(tmp_path, state)
    assert torch.equal(state["w"], value_of(1)) and state["step"] == 1 and state["notes"] == [1, {"deep": 2}]


def slowly(name):
    return lambda at, called, args: time.sleep(0.2) if called == name else None


def test_a_rank_without_a_thread_for_the_background(tmp_path):
    def run():
        start = threading.Thread.start

        def refused(thread):
            if thread.name == "vescale-checkpoint-save":
                raise RuntimeError("can't start new thread")
            start(thread)

        with pytest.MonkeyPatch.context() as patched:
            if dist.get_rank():
                patched.setattr(threading.Thread, "start", refused)
            save(tmp_path, state_of(1), asynchronous=True).wait()

    assert "can't start new thread" in raises_on_all(2, CheckpointError, run)
    assert os.listdir(tmp_path) == []
    run_ranks(2, lambda: save(tmp_path, state_of(1)).path)
    check_step(tmp_path, 1)


@pytest.mark.parametrize("victim", [0, 1])
def test_an_early_sync_that_fails_is_not_forgotten(tmp_path, victim):
    """The system tells of a failed write-back once: to whoever syncs first, which is a thread."""

    def run():
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_storage, "FLUSH_BYTES", 1)
            faulty = dist.get_rank() == victim
            with intercepted(_storage, failing("fdatasync", errno.EIO)) if faulty else contextlib.nullcontext():
                save(tmp_path, state_of(1))

    assert os.strerror(errno.EIO) in raises_on_all(2, StorageError, run)
    assert os.listdir(tmp_path) == []


# --- two savers -------------------------------------------------------------------------


def test_a_draft_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    make, swept = LocalStorage.make_dir, []

    def make_then_sweep(storage, path):
        make(storage, path)
        if not swept:  # another saver takes it for debris
            swept.extend(Root(tmp_path, "save").sweep())

    monkeypatch.setattr(LocalStorage, "make_dir", make_then_sweep)
    draft = Root(tmp_path, "save").begin(5, overwrite=False)
    assert len(swept) == 1 and os.listdir(tmp_path) == [draft.name]
    draft.discard()


# --- time ---------------------------------------------------------------------------------


class Store:
    """A store of rank 0's session in which rank 1 beats, and answers at `answers_at`; both stop between two looks."""

    def __init__(self, clock, answers_at):
        self.clock, self.answers_at, self.beats = clock, answers_at, True

    def has_extended_api(self):
        return True

    def set(self, key, value):
        pass

    def check(self, keys):
        return self.clock.now > self.answers_at

    def multi_get(self, keys):
        return [b"0:yes"]

    def compare_set(self, key, expected, desired):
        if "/beat/" not in key:
            return (desired if expected == "" else expected).encode()
        return json.dumps(Beat(int(self.clock.ran) if self.beats else 7, 0, "save", False, "here", 0.0)).encode()


class Clock:
    """Time of a machine that is suspended for 1000 seconds after 3. Whoever sleeps lets the watch go round."""

    def __init__(self):
        self.now = self.ran = 0.0
        self.presence = None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.ran += seconds
        self.now += seconds
        if self.ran > 3.0 and self.now < 1000.0:
            self.now += 1000.0
        self.presence.watch()


def watched_session(monkeypatch, clock, answers_at):
    for module in (_sync, _presence):
        monkeypatch.setattr(module, "time", clock)
    store = Store(clock, answers_at)
    clock.presence = Presence(store, 0, 2)
    return Session("save", 0, 2, store, 0, clock.presence), store


def test_a_process_that_was_stopped_takes_nobody_for_dead(monkeypatch):
    session, _ = watched_session(monkeypatch, Clock(), 1005.0)
    assert session.to_first("ready", b"") == [b"", b"yes"]


def test_who_is_silent_is_still_found_in_time(monkeypatch):
    clock = Clock()
    clock.ran, clock.now = 10.0, 1010.0  # not suspended any more
    session, store = watched_session(monkeypatch, clock, 1e9)
    store.beats = False
    with pytest.raises(CheckpointError, match="rank 1 fell silent"):
        session.to_first("ready", b"")
    assert clock.now - 1010.0 < 10
