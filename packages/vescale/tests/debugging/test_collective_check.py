"""Code that one rank runs alone: its collective meets no other, both ranks raise, and nothing has a wrong number."""

import gc
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_testkit import RankError, run_ranks, warm_up
from vescale_testkit.worker_pool import pool

warm_up("torch._dynamo", "vescale", "vescale_testkit.second")
PLANS = {
    "tp": {
        "mesh": {"tp": 2},
        "parameters": {"0.*": {"tp": vescale.Shard(0)}, "2.weight": {"tp": vescale.Shard(1)}, "*": {}},
    },
    "zero3": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 3},
    "zero2": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 2},
}


def norm(model, x):
    return nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


def weight(model, x):
    return model[0].weight[0, :3].tolist() + [model[2].weight.sum().item()]


def evaluation(model, x):
    with torch.no_grad():
        return F.cross_entropy(model(x), torch.zeros(8, dtype=torch.int64)).item()


def full(model, x):
    return model[2].weight.full_tensor().sum().item()


def train(plan, alone, who, device="cpu"):
    """Steps in which rank `who` computes something after backward; None: all do. What it computed, and the error.

    plan: None: on one device.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if plan is not None:
        model, optimizer = vescale.parallelize(vescale.Plan(**PLANS[plan]), model, optimizer)
    computed = []
    try:
        for step in range(5):
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(8, 16, generator=draw).to(device)
            labels = torch.randint(10, (8,), generator=draw).to(device)
            F.cross_entropy(model(x), labels).backward()
            if step == 2 and who in (None, dist.get_rank()):
                computed.append(alone(model, x))
            optimizer.step()
            optimizer.zero_grad()
    except vescale.CommunicationError as error:
        return computed, str(error)
    return computed, None


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("plan", "alone"), [("zero3", norm), ("tp", norm), ("zero2", norm), ("zero3", evaluation), ("tp", full)]
)
def test_what_one_rank_computes_alone_raises_on_both(plan, alone, who):
    try:
        found = run_ranks(2, train, plan, alone, who)
    finally:
        pool.end(2, "cpu")  # its connections are closed
    assert [computed for computed, _ in found] == [[], []]
    rule = re.compile(r"collective [\d,]+ over axis '\w+' is not the same on all ranks")
    saw = [said for _, said in found if rule.search(said)]
    assert len(saw) == 2, found  # the other by its first cause
    for said in saw:
        assert re.search(r"rank 0  in .*, with(out)? gradients.*\n.*rank 1  in .*, with(out)? gradients", said), said
        assert "test_collective_check.py:" in said, said


def test_on_both_ranks_it_is_what_one_device_computes():
    (expected,) = run_ranks(1, train, None, norm, None)
    found = run_ranks(2, train, "zero3", norm, None)
    assert found[0] == found[1] and found[0][1] is None
    assert found[0][0] == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.parametrize("alone", [norm, evaluation])
def test_on_a_device_with_nccls_manners(alone):
    """The rank that comes second raises; the other, whose device waits, ends with the job."""

    def raises():
        computed, said = train("zero3", alone, 0, "second")
        raise RuntimeError(f"computed {computed}, {said}")

    with pytest.raises(RankError, match=r"computed \[\], .* is not the same on all ranks"):
        run_ranks(2, raises, device="second")
    pool.end(2, "second")


def test_the_comparison_can_be_turned_off():
    def boards():
        import os

        from vescale_dtensor._communication.collective_check import board_of

        os.environ["VESCALE_BOARD"] = "0"
        off = board_of(dist.group.WORLD)
        del os.environ["VESCALE_BOARD"]
        return off is None, board_of(dist.group.WORLD) is not None

    assert run_ranks(2, boards) == [(True, True)] * 2


def test_what_killed_processes_left_in_shared_memory_goes_when_the_next_world_starts(monkeypatch, tmp_path):
    from vescale_dtensor._communication import collective_check as check

    monkeypatch.setattr(check, "_SHARED_MEMORY", tmp_path)
    left, used, other = (tmp_path / f"{check._PREFIX}{name}" for name in ("left", "used", "link"))
    here = check.Board("group", 0, range(2))
    here._map(used)
    left.write_bytes(b"\0" * 4096)
    (tmp_path / "target").touch()
    other.symlink_to(tmp_path / "target")
    check._remove_left()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["target", other.name, used.name])
    there = check.Board("group", 1, range(2))  # who comes second opens the file that the first has
    there._map(used)
    assert [here._memory[:8].tobytes(), there._memory[:8].tobytes()] == [b"\0" * 8] * 2
    here._memory[0] = 7
    assert there._memory[0] == 7
    del here, there
    gc.collect()
    check._remove_left()
    assert not used.exists()


def test_a_world_that_starts_removes_what_the_dead_left():
    def remain():
        from vescale_dtensor._communication import collective_check as check

        dead = check._SHARED_MEMORY / f"{check._PREFIX}of-the-dead-{dist.get_rank()}"
        dead.touch()
        check._boards.clear()
        board = check.board_of(dist.group.WORLD)
        board._open()
        dist.barrier()
        return dead.exists(), board._path.exists()

    assert run_ranks(2, remain) == [(False, True)] * 2
