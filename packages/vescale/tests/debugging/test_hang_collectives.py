"""Planted hangs of collectives: every rank says the same of which ranks disagree, since when, over which axis, at which
line; and each has its last collectives to show.

A rank waits in a thread of its own, which is left behind with the process once all ranks know the verdict.
"""

import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vescale_dtensor import Partial, Replicate, Shard, from_local
from vescale_testkit import in_turns, mesh_of, run_ranks, warm_up
from vescale_testkit.worker_pool import pool

warm_up("torch._dynamo", "vescale", "vescale_testkit.second")
BEFORE = 60  # collectives that go well: more than are kept
LINES = Path(__file__).read_text().splitlines()


def meeting(planted, names, sizes, device, ends):
    """Runs `planted` in a thread until the hang is known, or it raises: verdict, error and report of this rank.

    The ranks do not see each other's boards (`test_collective_check.py`), as those of different machines do not.

    ends: whether it is to end long before the bound.
    """
    from vescale_dtensor._communication import flight_recorder as recorder
    from vescale_dtensor._communication.hangs import hang
    from vescale_testkit.second import _work

    _work.HANG_SECONDS = 60
    mesh, errors = mesh_of(*sizes, names=names), []
    partial, cut = given(mesh, device)
    for name in names:  # makes groups
        reduced(partial, name)
    for group in recorder.rank_groups:
        group.board = None
    if hang._watch is not None:
        hang._watch.close()
    os.environ.update(VESCALE_HANG_SECONDS="400" if ends else "4", VESCALE_HANG_DIR=os.devnull)

    def run():
        try:
            for _ in range(BEFORE):
                reduced(partial, names[0])
            planted(partial, cut, dist.get_rank())
        except Exception as error:
            errors.append(str(error))
        threading.Event().wait()  # the watch looks at this thread

    thread = threading.Thread(target=run, daemon=True)
    hang._watch = hang.Watch()
    thread.start()
    hang._watch.main.ident = thread.ident
    until = time.monotonic() + 60
    raises = ends or device != "cpu"
    while not (errors if raises else hang.verdict()) and time.monotonic() < until:
        time.sleep(0.05)
    rank = dist.get_rank()
    while_it_waited = hang._watch._written(hang._REPORT, rank)
    return hang.verdict(), errors, while_it_waited or hang.report(rank, thread.ident)


def given(mesh, device):
    """What is converted, made before anything is planted: to make it, ranks compare what they have."""
    partial = {
        axis: from_local(
            torch.ones(5, device=device),
            mesh,
            [Partial() if name == axis else Replicate() for name in mesh.mesh_dim_names],
        )
        for axis in mesh.mesh_dim_names
    }
    cut = from_local(torch.ones(5, device=device), mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1))
    return partial, cut


def reduced(partial, axis):
    """The sum over one axis; everywhere else the value is whole."""
    one = partial[axis] * 1.0  # a value of its own: conversions are remembered
    return one.redistribute(placements=[Replicate()] * one.device_mesh.ndim)


def skips_one(partial, cut, rank):
    if rank == 0:
        reduced(partial, "dp")  # skipped on rank 1
    cut.full_tensor()
    reduced(partial, "dp")


def in_another_order(partial, cut, rank):
    """Around the mesh each waits for the next one: 0 for 1 (tp), 1 for 3 (dp), 3 for 2 (tp), 2 for 0 (dp)."""
    for axis in ("tp", "dp") if rank in (0, 3) else ("dp", "tp"):
        reduced(partial, axis)


def reads_alone(partial, cut, rank):
    """What is written most: a rank that prints alone."""
    if rank == 0:
        print(cut.sum().item())
    for _ in range(3):
        reduced(partial, "dp")


def computes_alone(partial, cut, rank):
    """The others' next collective takes the place of the one that a rank made alone, until all are to read."""
    if rank == 1:
        reduced(partial, "dp")
    for _ in range(3):
        reduced(partial, "dp")
    print(cut.sum().item())


def hung(planted, names, sizes, device="cpu", ends=False):
    ranks = torch.Size(sizes).numel()
    found = run_ranks(ranks, meeting, planted, names, sizes, device, ends, device=device, timeout=150)
    pool.end(ranks, device)  # nobody uses again what has hung
    verdicts, errors, reports = zip(*found)
    for rank, one in enumerate(reports):
        assert one["rank"] == rank and len(one["events"]) == 50
        assert {"axes", "ranks", "number", "kind", "state", "cause"} <= one["events"][0].keys()
    return verdicts, errors, reports


@in_turns(3)
def test_a_collective_that_a_rank_skips_is_named_with_what_it_did_instead():
    verdicts, _, _ = hung(skips_one, ("dp",), (2,))
    assert verdicts[0] == verdicts[1]
    first = verdicts[0].split("; ")[0]
    assert re.match(r"collective \d+ over axis 'dp' is not the same on all ranks: ", first), first
    assert re.search(r"rank 0 in all_reduce.* and rank 1 in all_gather", first), first


@in_turns(3)
def test_a_collective_that_a_rank_skips_is_an_error_at_once_on_the_second_device():
    _, errors, reports = hung(skips_one, ("dp",), (2,), "second")
    for said in errors:
        assert "ranks of a group are in different collectives" in said[0], said
    from vescale_dtensor._communication.hangs.disagreements import compared

    told = compared(dict(enumerate(reports)), 2)  # what a hang would have said
    assert re.match(r"collective \d+ over axis 'dp' is not the same on all ranks: ", told), told
    assert "rank 0 in all_reduce" in told and "rank 1 in all_gather" in told, told


def test_axes_in_another_order_are_named_with_their_lines():
    verdicts, _, reports = hung(in_another_order, ("dp", "tp"), (2, 2))
    assert len(set(verdicts)) == 1
    for axis in ("dp", "tp"):
        assert f"over axis '{axis}'" in verdicts[0], verdicts[0]
    assert "rank 1 has none over it among the last 50" in verdicts[0], verdicts[0]  # it was long ago
    line = next(number for number, text in enumerate(LINES, 1) if text == "        reduced(partial, axis)")
    for rank, one in enumerate(reports):
        (waits,) = one["waiting"]
        assert waits["axes"] == (["tp"] if rank in (0, 3) else ["dp"]) and rank in waits["ranks"]
        assert any(f"{__file__}:{line} in in_another_order" in place for place in one["lines"]), one["lines"]


@in_turns(3)
@pytest.mark.parametrize("planted", [reads_alone, computes_alone])
@pytest.mark.parametrize("sizes", [(2,), (3,)])
def test_what_one_rank_asks_for_alone_ends_on_all_ranks_in_seconds(planted, sizes):
    """With the line that only one rank came to; long before the bound of a wait."""
    _, errors, _ = hung(planted, ("dp",), sizes, ends=True)
    odd = 0 if planted is reads_alone else 1
    line = next(number for number, text in enumerate(LINES, 1) if f"def {planted.__name__}" in text)
    read = next(number for number, text in enumerate(LINES, 1) if number > line and "print(" in text)
    for (said,) in errors:
        assert "found a deadlock" in said, said
    assert any(f"{__file__}:{read} in {planted.__name__}" in said for (said,) in errors), errors
    assert any(f"rank {odd}" in said for (said,) in errors), errors
