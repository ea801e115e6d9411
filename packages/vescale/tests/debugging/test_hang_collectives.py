"""Planted hangs of collectives: every rank says the same of which ranks disagree, since when, over which axis, at which
line; and each has its last collectives to show.

A rank waits in a thread of its own, which is left behind with the process once all ranks know the verdict.
"""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vescale_dtensor import Partial, Replicate, Shard, from_local
from vescale_dtensor._test_kit.worker_pool import pool
from vescale_dtensor.testing import RankError, mesh_of, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "vescale_dtensor._second")
BEFORE = 60  # collectives that go well: more than are kept
LINES = Path(__file__).read_text().splitlines()


def meeting(planted, names, sizes, device):
    """Runs `planted` in a thread until the hang is known, or it raises: verdict, error and report of this rank."""
    from vescale_dtensor._communication import hang
    from vescale_dtensor._second import _work

    _work.HANG_SECONDS = 60
    mesh, errors = mesh_of(*sizes, names=names), []
    reduced(mesh, names[0], 2, device)  # makes groups
    if hang._watch is not None:
        hang._watch.close()
    os.environ.update(VESCALE_HANG_SECONDS="4", VESCALE_HANG_DIR=os.devnull)

    def run():
        try:
            for _ in range(BEFORE):
                reduced(mesh, names[0], 3, device)
            planted(mesh, dist.get_rank(), device)
        except Exception as error:
            errors.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    hang._watch = hang.Watch()
    thread.start()
    hang._watch._main = thread.ident
    until = time.monotonic() + 60
    while hang.verdict() is None and not errors and time.monotonic() < until:
        time.sleep(0.05)
    return hang.verdict(), errors, hang.report(dist.get_rank(), thread.ident)


def reduced(mesh, axis, numel, device):
    """The sum over one axis; everywhere else the value is whole."""
    placements = [Partial() if name == axis else Replicate() for name in mesh.mesh_dim_names]
    return from_local(torch.ones(numel, device=device), mesh, placements).redistribute(placements=REPLICATED[mesh.ndim])


def gathered(mesh, numel, device):
    return from_local(torch.ones(numel, device=device), mesh, [Shard(0)]).full_tensor()


REPLICATED = {count: [Replicate()] * count for count in (1, 2)}


def skips_one(mesh, rank, device):
    if rank == 0:
        reduced(mesh, "dp", 5, device)  # skipped on rank 1
    gathered(mesh, 5, device)
    reduced(mesh, "dp", 7, device)


def in_another_order(mesh, rank, device):
    """Around the mesh each waits for the next one: 0 for 1 (tp), 1 for 3 (dp), 3 for 2 (tp), 2 for 0 (dp)."""
    for axis in ("tp", "dp") if rank in (0, 3) else ("dp", "tp"):
        reduced(mesh, axis, 5, device)


def hung(planted, names, sizes, device="cpu"):
    ranks = torch.Size(sizes).numel()
    found = run_ranks(ranks, meeting, planted, names, sizes, device, device=device, timeout=150)
    pool.end(ranks, device)  # nobody uses again what has hung
    verdicts, errors, reports = zip(*found)
    for rank, one in enumerate(reports):
        assert one["rank"] == rank and len(one["events"]) == 50
        assert {"axes", "ranks", "number", "kind", "state", "cause"} <= one["events"][0].keys()
    return verdicts, errors, reports


def test_a_collective_that_a_rank_skips_is_named_with_what_it_did_instead():
    verdicts, _, _ = hung(skips_one, ("dp",), (2,))
    assert verdicts[0] == verdicts[1]
    first = verdicts[0].split("; ")[0]
    number = BEFORE + 2
    assert first.startswith(f"collective {number} over axis 'dp' is not the same on all ranks: "), first
    assert re.search(r"rank 0 in all_reduce.* and rank 1 in all_gather", first), first


def test_a_collective_that_a_rank_skips_is_an_error_at_once_that_names_both_on_the_second_device():
    _, errors, reports = hung(skips_one, ("dp",), (2,), "second")
    for said in errors:
        assert "ranks of a group are in different collectives" in said[0], said
        assert "all_reduce(" in said[0] and "all_gather(" in said[0], said
    from vescale_dtensor._communication.disagreements import compared

    told = compared(dict(enumerate(reports)), 2)  # what a hang would have said
    assert told.startswith(f"collective {BEFORE + 2} over axis 'dp' is not the same on all ranks: "), told


def test_axes_in_another_order_are_named_with_their_lines():
    verdicts, _, reports = hung(in_another_order, ("dp", "tp"), (2, 2))
    assert len(set(verdicts)) == 1
    for axis in ("dp", "tp"):
        assert f"over axis '{axis}'" in verdicts[0], verdicts[0]
    line = next(number for number, text in enumerate(LINES, 1) if "reduced(mesh, axis, 5, device)" in text)
    for rank, one in enumerate(reports):
        (waits,) = one["waiting"]
        assert waits["axes"] == (["tp"] if rank in (0, 3) else ["dp"]) and rank in waits["ranks"]
        assert any(f"{__file__}:{line} in in_another_order" in place for place in one["lines"]), one["lines"]


def dies(mesh, rank, device):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    reduced(mesh, "dp", 5, device)


def test_a_rank_that_was_killed_is_the_one_that_does_not_answer():
    def meets(device):
        verdict, errors, _ = meeting(dies, ("dp",), (2,), device)
        raise AssertionError(f"told: {verdict} {errors}")

    with pytest.raises(RankError) as failed:
        run_ranks(2, meets, "second", device="second", timeout=150)
    pool.end(2, "second")
    said = str(failed.value)
    assert "rank 1 did not answer: gone, or stopped" in said, said
