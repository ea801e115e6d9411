"""Ranks that end, or stop, between or in calls: the others raise in bounded time, and name what came first."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from vescale_testkit import free_port, in_turns

RANKS = 2
SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from torch.nn import functional as F
import vescale

torch.set_num_threads(1)
KIND, CASE, RANK = sys.argv[1], sys.argv[2], int(os.environ["RANK"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def fails(*args):
    raise ValueError("of the user")


def stops(*args):
    os.kill(os.getpid(), signal.SIGSTOP)


if KIND == "pipeline":
    pipeline = vescale.Pipeline(cuts=("blocks.2",), microbatches=2)
    plan = vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, pipeline=pipeline)
else:
    plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}})
torch.manual_seed(0)
model, optimizer = vescale.parallelize(plan, Net(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
if KIND == "pipeline" and CASE == "stopped":
    from vescale_dtensor._communication.hangs import hang
    hang._watch.silent_s = 4.0
x, y = torch.randn(2, 8, 4)
for step in range(4):
    loss = model(x, y)
    if step == 1 and (RANK, CASE) in ((1, "killed"), (0, "first killed")):
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    if step == 1 and RANK == 1 and "killed" not in CASE:
        {"leaves": sys.exit, "stopped": stops, "hook": lambda: optimizer.register_step_pre_hook(fails)}[CASE]()
    optimizer.step()
    optimizer.zero_grad()
"""


def ended(tmp_path, kind, case, patience=90):
    """Rank 0's exit status, what it said at the end, and how long it took; rank 1 is killed afterwards. Of rank 1
    where rank 0 is killed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port = free_port()
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), kind, case]
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(command, env=clean | {"RANK": str(rank)}, **outputs) for rank in range(RANKS)]
    began, heard = time.monotonic(), ranks[case == "first killed"]
    try:
        said, _ = heard.communicate(timeout=patience)
        return heard.returncode, said, time.monotonic() - began
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate()


CASES = [
    ("pipeline", "hook", "PipelineFailure", r"rank 1 raised ValueError: of the user, at .*train\.py:\d+"),
    ("data", "hook", "CommunicationError", r"rank 1 raised ValueError: of the user, at .*train\.py:\d+"),
    ("pipeline", "killed", "PipelineFailure", r"rank 0, in the beginning of call 3, lost rank 1: "),
    ("data", "killed", "CommunicationError", r"gradient sync \(backward\)"),
    ("data", "killed", "CommunicationError", r"first cause: rank 1 \(process \d+\) on .* ended without a word"),
    (
        "data",
        "first killed",
        "CommunicationError",
        r"first cause: (rank 0 .* ended, and with it|the process that holds) the ranks' store",
    ),
    ("data", "leaves", "CommunicationError", r"rank 1 came to the end of its script, or called sys\.exit"),
]


@in_turns(3)
@pytest.mark.parametrize("kind, case, error, cause", CASES)
def test_what_ended_a_rank_between_calls_is_the_others_first_cause(tmp_path, kind, case, error, cause):
    status, said, _ = ended(tmp_path, kind, case)
    assert status == 1, said
    assert re.search(cause, said[said.rindex(error) :]), said


@in_turns(3)
def test_a_stage_that_is_stopped_is_found_and_named(tmp_path):
    status, said, seconds = ended(tmp_path, "pipeline", "stopped")
    assert status == 1, said
    assert "PipelineFailure: pipeline: rank 1 fell silent: rank 0 saw no sign of life for 4 s" in said
    assert seconds < 60
