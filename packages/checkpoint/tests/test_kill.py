"""Fault group 1: ranks killed at any point of a save. The latest step is the old one or the new one, never a mix."""

import os
import random
import time

import pytest
import torch

from vescale_checkpoint import load, save
from vescale_checkpoint.io import _storage
from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_testkit import in_turns, intercepted, killed_at, mesh_of, slice_of

RANKS, CALLS = 2, 18  # the second save makes about so many calls that change the disk


def value_of(step):
    return torch.arange(4096 * 3, dtype=torch.float32).view(4096, 3) + step / 7


def state_of(step):
    mesh = mesh_of(RANKS)
    return {
        "model": {"w": distribute_tensor(value_of(step), mesh, [Shard(0)])},
        "norm": distribute_tensor(value_of(step)[:50], mesh, [Replicate()]),
        "step": step,
    }


def save_twice(rank, path, dying):
    """Saves step 1, then step 2, in which this rank dies at its call number dying[rank], if that is not None."""
    save(path, state_of(1))
    number = dying[rank]
    started = time.monotonic()
    try:
        with intercepted(_storage, killed_at(number)) as calls:
            save(path, state_of(2))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "saved", calls.count, time.monotonic() - started


def check_latest(path):
    """The step that loads, bit for bit, in this process."""
    state = {"model": {"w": torch.zeros(4096, 3)}, "norm": torch.zeros(50, 3), "step": 0}
    load(path, state)
    wanted = value_of(state["step"])
    assert torch.equal(state["model"]["w"], wanted) and torch.equal(state["norm"], wanted[:50])
    return state["step"]


def check_swept(path):
    save(path, {"x": torch.ones(1), "step": 9})
    assert all(name in ("step-00000001", "step-00000002", "step-00000009") for name in os.listdir(path))


def test_the_calls_are_counted(tmp_path, start_world):
    counts = [answer[1][1] for answer in start_world(RANKS, save_twice, tmp_path, [None, None]).answers()]
    assert CALLS - 6 <= max(counts) <= CALLS, counts


POINTS = [random.Random(1).randint(1, CALLS) for _ in range(20)]


@pytest.mark.parametrize("point", slice_of(list(enumerate(POINTS)), 5), ids=str)
def test_one_rank_dies(tmp_path, start_world, point):
    number, call = point
    victim = number % RANKS
    dying = [call if rank == victim else None for rank in range(RANKS)]
    answers = start_world(RANKS, save_twice, tmp_path, dying).answers()
    kind, text, seconds = answers[1 - victim][1]
    step = check_latest(tmp_path)
    if answers[victim][0] == "died":
        assert kind == "PeerError" and f"rank {victim} fell silent" in text
        assert seconds < 10
    else:  # it had no more calls to make
        assert kind == "saved" and step == 2
    check_swept(tmp_path)


@pytest.mark.parametrize("point", slice_of(list(enumerate(POINTS)), 10), ids=str)
def test_all_ranks_die(tmp_path, start_world, point):
    number, call = point
    rng = random.Random(number)
    dying = [call, rng.randint(1, CALLS // 2)]
    answers = start_world(RANKS, save_twice, tmp_path, dying).answers()
    committed = any(answer[0] == "returned" and answer[1][0] == "saved" for answer in answers)
    assert check_latest(tmp_path) in ((2,) if committed else (1, 2))
    check_swept(tmp_path)


@in_turns(3)
def test_with_the_usual_patience_a_dead_rank_is_told_by_its_silence(tmp_path, start_world):
    answers = start_world(RANKS, patiently, tmp_path).answers()
    assert answers[1][0] == "died"
    kind, text, _ = answers[0][1]
    assert kind == "PeerError" and "fell silent" in text
    assert check_latest(tmp_path) == 1


def patiently(rank, path):
    from vescale_checkpoint.sync import _presence

    _presence.SILENT_S, _presence.BEAT_S = 6.0, 0.5
    return save_twice(rank, path, [None, 2])
