"""Attempts of a job that have one store, as under `torchrun --max-restarts`: none takes the words of another."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from vescale_checkpoint import CheckpointError, load, save
from vescale_checkpoint.io._storage import _LocalWriter
from vescale_dtensor import Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

STEPS = 4


def value_of(attempt, step):
    return torch.arange(24.0).view(6, 4) + 100 * attempt + step


class Dies:
    """An object of the state, whose rank is killed when it is asked for its part."""

    def __init__(self, now):
        self.now = now

    def state_dict(self):
        if self.now:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"a": 1}

    def load_state_dict(self, state):
        pass


def attempt(rank, path, number, dies_at, anew, asynchronous):
    """Goes on from the newest step, or anew over the old ones. Rank 1 is killed in its save of step `dies_at`."""
    mesh = mesh_of(2)
    state = {"w": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]), "dies": Dies(False), "step": 0}
    if number and not anew:
        load(path, state)
    began = state["step"]
    for step in range(began + 1, STEPS + 1):
        state["step"], state["dies"].now = step, rank == 1 and step == dies_at
        state["w"] = distribute_tensor(value_of(number, step), mesh, [Shard(0)])
        if number and rank:
            time.sleep(0.05)  # ranks do not come at the same moment
        pending = save(path, state, overwrite=anew, asynchronous=asynchronous)
    pending.wait()
    return began


def check(path, numbers):
    """Each committed step is whole, and of the attempt that is said."""
    assert sorted(os.listdir(path)) == [f"step-{step:08d}" for step in sorted(numbers)]
    for step, number in numbers.items():
        state = {"w": torch.zeros(6, 4)}
        load(path, state, step=step, extra="ignore")
        assert torch.equal(state["w"], value_of(number, step)), (step, state["w"])


def test_the_next_attempt_goes_on_from_the_newest_step(tmp_path, start_world):
    first = start_world(2, attempt, tmp_path, 0, 3, False, False)
    assert first.answers()[1] == ("died", -signal.SIGKILL)
    second = start_world(2, attempt, tmp_path, 1, None, False, False, after=first)
    assert second.answers() == [("returned", 2)] * 2
    check(tmp_path, {1: 0, 2: 0, 3: 1, 4: 1})


def test_an_attempt_that_begins_anew_replaces_steps_by_whole_ones(tmp_path, start_world):
    first = start_world(2, attempt, tmp_path, 0, 3, True, True)
    assert first.answers()[1] == ("died", -signal.SIGKILL)
    second = start_world(2, attempt, tmp_path, 1, 2, True, True, after=first)
    assert second.answers()[1] == ("died", -signal.SIGKILL)
    load(tmp_path, {"w": torch.zeros(6, 4)}, step=2, extra="ignore")
    third = start_world(2, attempt, tmp_path, 2, None, True, True, after=second)
    assert third.answers() == [("returned", 0)] * 2
    check(tmp_path, dict.fromkeys(range(1, STEPS + 1), 2))


# --- words are no proof that a file is there ---------------------------------------------


def removed(path):
    os.unlink(path)


def shortened(path):
    os.truncate(path, os.path.getsize(path) - 1)


def altered(path):
    with open(path, "r+b") as file:
        file.seek(20)
        file.write(b"?")


@pytest.mark.parametrize("harm", [removed, shortened, altered])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_step_whose_files_are_not_as_their_ranks_say_is_not_committed(tmp_path, harm, overwrite):
    def run():
        mesh = mesh_of(2)
        state = {"w": distribute_tensor(value_of(0, 1), mesh, [Shard(0)]), "step": 1}
        save(tmp_path, state)
        close = _LocalWriter.close
        if dist.get_rank():

            def lose(writer):
                path = os.readlink(f"/proc/self/fd/{writer._fd}")
                close(writer)
                harm(path)

            _LocalWriter.close = lose
        try:
            state |= {"w": distribute_tensor(value_of(1, 1), mesh, [Shard(0)]), "step": 1 if overwrite else 2}
            with pytest.raises(CheckpointError) as error:
                save(tmp_path, state, overwrite=overwrite)
        finally:
            _LocalWriter.close = close
        return str(error.value)

    first, second = run_ranks(2, run)
    assert first == second
    assert first.startswith("save: ") and "nothing was committed" in first and "00001-" in first, first
    check(tmp_path, {1: 0})
