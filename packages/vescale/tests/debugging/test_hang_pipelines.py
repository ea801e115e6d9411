"""Forensics of a hang between stages: on every rank, which ranks disagree, and since which transfer of which call.

On gloo, where messages have tags, and on the second device, where they match in the order in which both ends post them.
"""

import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale_dtensor._communication.hangs.disagreements import compared
from vescale_pipeline import PipelineError
from vescale_testkit import in_turns, run_ranks, warm_up
from vescale_testkit.worker_pool import pool

warm_up("torch._dynamo", "vescale", "vescale_testkit.second")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def trained(odd, device, ranks):
    """Three calls, the third with `odd` done before: what this rank says of it, its error, and what it was in.

    Another pipeline of the same ranks has had three calls before, whose messages are called alike."""
    from vescale_dtensor._communication.hangs import hang
    from vescale_testkit.second import _work

    _work.HANG_SECONDS = 60
    torch.manual_seed(0)
    cuts = tuple(f"layers.{i}" for i in range(1, ranks))
    pipeline = vescale.Pipeline(axis="pp", cuts=cuts, schedule="1f1b", microbatches=4)
    plan = vescale.Plan(mesh={"pp": ranks, "dp": 1}, parameters={"*": {}}, pipeline=pipeline)
    model, _ = vescale.parallelize(plan, Net().to(device), torch.optim.SGD)
    other, _ = vescale.parallelize(plan, Net().to(device), torch.optim.SGD)
    batch, error = torch.ones(8, 4, device=device), ""
    for _ in range(3):
        other(batch).backward()
    for _ in range(2):
        model(batch).backward()
    hang._watch.close()
    os.environ.update(VESCALE_HANG_SECONDS="8", VESCALE_HANG_DIR=os.devnull)
    together("ready", ranks)
    hang._watch = hang.Watch()
    runtime = model._vescale.runtime
    odd(runtime, model)
    try:
        model(batch).backward()
    except PipelineError as failure:
        error = str(failure)
    together("over", ranks)
    until = time.monotonic() + 60
    while hang.verdict() is None and "a deadlock on NCCL" not in error and time.monotonic() < until:
        time.sleep(0.05)
    rank = dist.get_rank()
    while_it_waited = hang._watch._written(hang._REPORT, rank)
    return hang.verdict(), error, while_it_waited or hang.report(rank, threading.main_thread().ident)


def together(what, ranks):
    store = dist.distributed_c10d._get_default_store()
    store.add(what, 1)
    while store.add(what, 0) < ranks:
        time.sleep(0.02)


def hangs(odd, device, ranks=2):
    found = run_ranks(ranks, trained, odd, device, ranks, device=device, timeout=120)
    pool.end(ranks, device)  # nobody uses again what has hung
    verdicts, errors, reports = zip(*found)
    return verdicts, errors, dict(enumerate(reports))


def skips_a_send(runtime, model):
    send = runtime.link.send

    def skipping(peer, tag, tensors, until=None):
        if runtime.rank == 0 and "activation of microbatch 1 " in runtime.tags.told(tag):
            return
        send(peer, tag, tensors, until)

    runtime.link.send = skipping


def stops(runtime, model):
    if runtime.rank == 1:
        model.layers[1].register_forward_pre_hook(sleeps)


def sleeps(module, args):
    from vescale_dtensor._communication.hangs.hang import verdict

    until = time.monotonic() + 60
    while verdict() is None and time.monotonic() < until:
        time.sleep(0.1)


def posts_in_another_order(runtime, model):
    (known,) = runtime._calls.values()
    turns = type(known).turns

    def swapped(call, schedule, rank, trains, posts_ahead):
        """Rank 0 waits for the first gradient before it has sent what the other stage needs for it."""
        found = list(turns(call, schedule, rank, trains, False))
        if rank == 0:
            first = next(i for i, (action, _) in enumerate(found) if action.kind == "SEND_F")
            for kind in ("B", "RECV_B"):
                backward = next(turn for turn in found if turn[0].kind == kind)
                found.remove(backward)
                found.insert(first, backward)
        return found

    known.__class__ = type("Call", (type(known),), {"turns": swapped})


@in_turns(3)
def test_a_send_that_is_left_out_is_named_on_all_ranks():
    verdicts, errors, reports = hangs(skips_a_send, "cpu")
    assert verdicts[0] == verdicts[1]
    assert all(one["waiting"] for one in reports.values())
    missing = "the activation of microbatch 1 for stage 1, part 0, from rank 0 to rank 1 in call 3"
    told = verdicts[0].split("; ")[0]
    assert told.startswith(f"rank 1 waits over axis 'pp' for {missing}, at {__file__}:"), told
    assert "and rank 0 has passed it by, to the activation of microbatch 2 for stage 1" in told
    for error in errors:
        assert verdicts[0] in error and re.search(r"rank \d found a deadlock: ", error), error


def test_a_send_that_is_left_out_is_named_where_messages_have_no_tags():
    _, errors, reports = hangs(skips_a_send, "second")
    assert all("a deadlock on NCCL" in error for error in errors), errors  # the second device sees it at once
    told = compared(reports, 2).split("; ")[0]  # what a hang would have said
    assert "is not the same on all ranks: " in told and "in call 3" in told, told
    assert "gradient of microbatch 0 for stage 0" in told and "activation of microbatch 1 for stage 1" in told, told


@in_turns(3)
@pytest.mark.parametrize("device", ["cpu", "second"])
def test_a_rank_that_stops_is_named_with_its_line(device):
    verdicts, _, _ = hangs(stops, device)
    assert verdicts[0] == verdicts[1]
    told = verdicts[0].split("; ")[0]
    line = int(told.rpartition(f"{__file__}:")[2].split()[0])
    assert "time.sleep" in Path(__file__).read_text().splitlines()[line - 1], told
    assert "rank 1" in told and "over axis 'pp'" in told and "in call 3" in told, told


@in_turns(3)
def test_stages_that_disagree_about_the_order_are_named():
    verdicts, errors, _ = hangs(posts_in_another_order, "cpu")
    assert verdicts[0] == verdicts[1] and all("found a deadlock: " in error for error in errors)
    told = verdicts[0].split("; ")[0]
    assert "waits over axis 'pp' for the " in told and "microbatch 0" in told and "in call 3" in told, verdicts[0]


def test_stages_that_disagree_about_the_order_are_named_where_messages_have_no_tags():
    _, errors, reports = hangs(posts_in_another_order, "second")
    assert all("a deadlock on NCCL" in error for error in errors), errors
    told = compared(reports, 2).split("; ")[0]
    assert "is not the same on all ranks: " in told and "from rank 1 to rank 0 in call 3" in told, told


@in_turns(3)
def test_the_first_cause_comes_first_in_a_chain():
    verdicts, _, _ = hangs(skips_a_send, "cpu", ranks=3)
    assert len(set(verdicts)) == 1
    assert "the activation of microbatch 1 for stage 1" in verdicts[0].split("; ")[0], verdicts[0]
