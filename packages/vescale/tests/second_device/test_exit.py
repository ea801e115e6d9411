"""At a process's end nothing that is partial holds it: NCCL, and the second device as it, wait for that for good."""

import os
import subprocess
import sys

from vescale_testkit import free_port, in_turns

SCRIPT = """
import atexit, os, sys, threading, time
from datetime import timedelta
from vescale_testkit.second import register

register()
import torch
import torch.distributed as dist
from torch import nn
import vescale
from vescale_plans._apply import join

CASE, RANK, FOLDER = sys.argv[1], int(os.environ["RANK"]), sys.argv[2]
torch.manual_seed(0)
plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}})
model, _ = vescale.parallelize(plan, nn.Linear(4, 4), torch.optim.SGD)
model(torch.ones(4, 4)).sum().backward()
x = torch.ones(4, device="second")


@atexit.register
def as_python_from_3_12_on():
    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    threading.Thread.start = start


if CASE == "exits":
    join.TIMEOUT = timedelta(seconds=3)
groups = [dist.new_group([0, 1]) for _ in range(2)]
if RANK == 0:
    work = dist.all_reduce(x, group=groups[0], async_op=True)
    if CASE == "exits":
        sys.exit(3)
elif CASE == "raises":
    work = dist.all_reduce(x, group=groups[1], async_op=True)
    raise ValueError("of the user")
else:
    while not os.path.exists(f"{FOLDER}/gone"):  # it lives, and never answers
        time.sleep(0.05)
"""


def ended(tmp_path, case):
    """Exit status and stderr of both ranks."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port = free_port()
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
        "VESCALE_SECOND_HANG_SECONDS": "300", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    command = [sys.executable, str(script), case, str(tmp_path)]
    ranks = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank), "LOCAL_RANK": "0"}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [ranks[0].communicate(timeout=150)[1]]
        (tmp_path / "gone").touch()
        said.append(ranks[1].communicate(timeout=300)[1])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [rank.returncode for rank in ranks], said


ABORTED = "at the end a collective is in flight that no rank answers: it is aborted"


@in_turns(3)
def test_who_exits_with_something_pending_is_held_no_longer_than_a_collective(tmp_path):
    status, said = ended(tmp_path, "exits")
    assert status == [3, 0] and ABORTED in said[0] and ABORTED not in said[1], said


@in_turns(3)
def test_who_raises_aborts_and_so_do_those_whom_it_leaves_waiting(tmp_path):
    status, said = ended(tmp_path, "raises")
    assert status == [0, 1] and ABORTED in said[0] and "ValueError: of the user" in said[1], said
