"""Fault group 6: several savers, loaders and retention on one directory; and debris."""

import contextlib
import os
import time

import pytest
import torch

from vescale_checkpoint import ConflictError, Retention, load, save
from vescale_checkpoint.io._commit import Root
from vescale_checkpoint.io._locks import leased
from vescale_checkpoint.io._storage import LocalStorage

SIZE = 300_000


def value_of(step):
    return torch.full((SIZE,), float(step)) + torch.arange(SIZE) / SIZE


def state_of(step, own=0):
    return {"w": value_of(step), "own": own, "step": step}


def step_loaded(path):
    state = {"w": torch.zeros(SIZE), "own": None, "step": 0}
    load(path, state)
    assert torch.equal(state["w"], value_of(state["step"]))
    return state["step"], state["own"]


def wait_for(path, name):
    (path / f"ready-{os.getpid()}").touch()
    while not (path / name).exists():
        time.sleep(0.001)


def save_when_told(rank, path, gate, own):
    wait_for(gate, "go")
    return save(path, state_of(1, own)).path


@pytest.mark.parametrize("attempt", range(3))
def test_two_savers_of_one_step(tmp_path, start_world, attempt):
    path, gate = tmp_path / "run", tmp_path / "gate"
    gate.mkdir()
    worlds = [start_world(1, save_when_told, path, gate, own) for own in (1, 2)]
    while len(os.listdir(gate)) < 2:
        time.sleep(0.01)
    (gate / "go").touch()
    answers = [world.answers()[0] for world in worlds]
    assert sorted(answer[0] for answer in answers) == ["raised", "returned"]
    loser = next(answer for answer in answers if answer[0] == "raised")
    assert loser[1] == "ConflictError" and "step 1 is committed already" in loser[2]
    winner = 1 + next(i for i, answer in enumerate(answers) if answer[0] == "returned")
    assert step_loaded(path) == (1, winner)
    assert os.listdir(path) == ["step-00000001"]


def test_a_step_that_is_committed_between_two_looks_is_told_as_such(tmp_path, monkeypatch):
    save(tmp_path, state_of(1))
    looks, committed = [], Root.committed

    def late(root):
        looks.append(committed(root))
        return looks[-1] if len(looks) > 1 else {}

    monkeypatch.setattr(Root, "committed", late)
    with pytest.raises(ConflictError, match="step 1 is committed already"):
        save(tmp_path, state_of(1))


def save_many(rank, path, steps):
    for step in range(2, steps):
        save(path, state_of(step), retention=Retention(last=1))


def load_many(rank, path, seconds):
    seen, ends = [], time.monotonic() + seconds
    while time.monotonic() < ends:
        seen.append(step_loaded(path)[0])
    return seen


def test_a_saver_beside_loaders_beside_retention(tmp_path, start_world):
    save(tmp_path, state_of(1))
    loaders = [start_world(1, load_many, tmp_path, 2.5) for _ in range(2)]
    saver = start_world(1, save_many, tmp_path, 40)
    assert saver.answers()[0][0] == "returned"
    for loader in loaders:
        kind, seen, *rest = loader.answers()[0]
        assert kind == "returned", (seen, rest)
        assert seen == sorted(seen) and len(seen) > 3
    assert step_loaded(tmp_path)[0] == 39


def test_steps_that_come_and_go_while_they_are_listed(tmp_path, monkeypatch):
    """After each of the first listings another step replaces the one that was listed."""
    save(tmp_path, state_of(1))
    names, steps = LocalStorage.names, iter((2, 3))

    def names_then_save(storage, path):
        found = names(storage, path)
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "names", names)
            for step in steps:
                save(tmp_path, state_of(step), retention=Retention(last=1))
                break
        return found

    monkeypatch.setattr(LocalStorage, "names", names_then_save)
    assert step_loaded(tmp_path)[0] == 3


def test_what_is_being_read_is_not_deleted(tmp_path):
    save(tmp_path, state_of(1))
    with leased(LocalStorage(), str(tmp_path / "step-00000001")) as there:
        assert there
        save(tmp_path, state_of(2), retention=Retention(last=1))
        assert list(Root(tmp_path, "load").committed()) == [1, 2]
    save(tmp_path, state_of(3), retention=Retention(last=1))
    assert list(Root(tmp_path, "load").committed()) == [3]


def test_a_draft_in_use_is_not_swept(tmp_path):
    root = Root(tmp_path, "save")
    draft = root.begin(5, overwrite=False)
    save(tmp_path, state_of(6))
    assert os.path.isdir(draft.path)
    draft.release()  # as when its process dies
    save(tmp_path, state_of(7))
    assert not os.path.exists(draft.path)


def test_who_still_writes_into_a_discarded_draft_leaves_nothing(tmp_path, monkeypatch):
    """Another rank makes its file after the directory was listed and before it is removed."""
    draft = Root(tmp_path, "save").begin(5, overwrite=False)
    remove = os.rmdir

    def late(path, *args, **kwargs):
        with contextlib.suppress(FileNotFoundError):
            open(f"{draft.path}/00001-{draft.identity}.safetensors", "wb").close()
        remove(path, *args, **kwargs)

    monkeypatch.setattr(os, "rmdir", late)
    draft.discard()
    assert os.listdir(tmp_path) == []


def test_debris_of_an_overwritten_step(tmp_path):
    """Killed between the two renames of an overwrite: the old step is still the step."""
    save(tmp_path, state_of(4))
    os.rename(tmp_path / "step-00000004", tmp_path / "step-00000004.old-0123456789abcdef")
    assert step_loaded(tmp_path)[0] == 4
    save(tmp_path, state_of(5))
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000005"]
    os.makedirs(tmp_path / "step-00000009.gone-0123456789abcdef")
    save(tmp_path, state_of(5, own=3), overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000005"]
    assert step_loaded(tmp_path) == (5, 3)


@pytest.mark.parametrize(
    "policy, kept",
    [
        (Retention(last=2), {9, 10}),
        (Retention(last=1, every=4), {4, 8, 10}),
        (Retention(best="loss"), {7, 10}),
        (Retention(best="loss", count=2), {3, 7, 10}),
        (Retention(best="loss", largest=True), {10, 5}),
        (Retention(best="never measured"), {10}),
    ],
    ids=str,
)
def test_retention_is_a_pure_choice(policy, kept):
    losses = {1: 0.9, 3: 0.2, 4: 0.5, 5: 1.5, 7: 0.1, 8: 0.7, 9: 0.6, 10: 0.8}
    assert policy.kept({step: {"loss": loss} for step, loss in losses.items()}) == kept


def test_retention_by_a_metric(tmp_path):
    for step, loss in enumerate([0.5, 0.1, 0.9, 0.3], 1):
        save(tmp_path, state_of(step), metrics={"loss": loss}, retention=Retention(best="loss"))
    assert list(Root(tmp_path, "load").committed()) == [2, 4]
