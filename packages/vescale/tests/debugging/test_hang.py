"""Forensics of a hang: every rank writes what it is in, and the errors say which ranks disagree since when."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from vescale_dtensor._communication import endings
from vescale_dtensor._communication.hangs import hang
from vescale_dtensor._communication.hangs.deadlock import deadlocked
from vescale_dtensor._communication.hangs.disagreements import compared
from vescale_dtensor._communication.hangs.standing import seen
from vescale_dtensor._communication.hangs.words import Word, last_seen, say
from vescale_testkit import free_port, in_turns, run_ranks

SCRIPT = """
import os, sys, time, datetime
import torch, torch.distributed as dist
import vescale
from torch import nn

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=7))
rank = dist.get_rank()
torch.manual_seed(0)
plan = vescale.Plan(mesh={{"dp": 2}}, parameters={{"*": {{}}}}, zero=1)
model, optimizer = vescale.parallelize(plan, nn.Linear(4, 4), torch.optim.SGD)
for step in range(4):
    loss = model(torch.ones(4, 4)).square().mean()
    if step == 3:
        {odd}
    loss.backward()  # where the others wait
    optimizer.step()
"""


HELPERS = """
import threading
from vescale_dtensor._communication.hangs import hang
hang.LEFT_S = 2

def take_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def spin():
    while True:
        sum(range(100))

def polls():
    event = threading.Event()
    while not event.wait(.1):
        pass
"""


def hung(tmp_path, odd, helpers=""):
    """What two ranks of SCRIPT write: their files, and their stderr; and their exit statuses."""
    script = tmp_path / "train.py"
    script.write_text(helpers + SCRIPT.format(odd=odd))
    common = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1", "VESCALE_HANG_SECONDS": "2", "VESCALE_HANG_DIR": str(tmp_path / "hang"),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    files = [Path(tmp_path, "hang", f"rank{rank}.txt").read_text() for rank in range(2)]
    return script, files, said, [rank.returncode for rank in ranks]


@pytest.mark.parametrize("away", ["take_twice", "spin", "polls"])
def test_a_rank_that_does_not_come_back_is_ended(tmp_path, away):
    """Of ranks without torchrun, which would end it on one machine alone."""
    _, _, said, statuses = hung(tmp_path, f"rank == 1 and {away}()", HELPERS)
    assert statuses == [1, 1]
    assert re.search(rf"rank 1 is ended, still at .*train.py:\d+ in {away}: .*rank 0 is at collective", said[1])


def test_a_function_is_left_when_it_is_over_whatever_it_calls():
    """What a loop calls comes and goes; the loop's function stays."""
    inside, again, after = (threading.Semaphore(0) for _ in range(3))

    def away():
        inside.release()
        again.acquire()
        inside.release()
        again.acquire(timeout=60)

    def program():
        away()
        inside.release()
        after.acquire()

    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    inside.acquire()
    before = seen(thread.ident)
    again.release()
    inside.acquire()
    assert " in away" in before.place and not seen(thread.ident).has_left(before)
    again.release()
    inside.acquire()
    assert seen(thread.ident).has_left(before)
    after.release()
    thread.join()
    assert seen(thread.ident).has_left(before)


@in_turns(3)
def test_a_rank_that_stays_away_is_named_with_its_line(tmp_path):
    script, files, said, _ = hung(tmp_path, "rank == 1 and time.sleep(14)")
    source = script.read_text().splitlines()
    backward = next(i for i, line in enumerate(source, 1) if "loss.backward()" in line)
    away = next(i for i, line in enumerate(source, 1) if "time.sleep" in line)
    told = files[0].splitlines()[0]
    assert files[1].splitlines()[0] == told  # every rank says the same
    assert told.startswith("rank 0 is at collective ") and "over axis 'dp'" in told and f"{script}:{backward}" in told
    assert "rank 1 has come to " in told and f"at {script}:{away}" in told
    for text in files:
        _, _, events = text.partition("last collectives, and transfers, newest first:\n")
        assert len(events.splitlines()) >= 6 and "axis dp" in events
    assert "CommunicationError" in said[0] and "hang: " in said[0]  # the error of the rank that waited


EVALUATES = """
        from vescale_dtensor._communication.hangs import hang
        if rank == 0:  # for longer than the bound: it moves
            begun = hang._watch.ran
            while hang._watch.ran < begun + 5:
                torch.ones(50, 50) @ torch.ones(50, 50)
        dist.barrier()
        print("together", file=sys.stderr)
        rank == 0 and dist.broadcast_object_list([1], 1)"""


@in_turns(3)
def test_a_call_of_torch_distributed_that_one_rank_makes_alone_ends_with_both_lines(tmp_path):
    """And an evaluation before a barrier of all, which takes longer than a wait may, does not."""
    script, files, said, _ = hung(tmp_path, EVALUATES.strip())
    source = script.read_text().splitlines()
    line, backward = (next(i for i, text in enumerate(source, 1) if what in text) for what in ("== 0 and", ".backward"))
    told = files[0].splitlines()[0]
    assert files[1].splitlines()[0] == told
    both = f"rank 0 is in broadcast_object_list, at {script}:{line} in <module> and rank 1 is at {script}:{backward}"
    assert told.startswith(both), told
    assert re.search(r"all have come to collective \d+ over axis 'dp' \(", told), told
    assert all("together" in text and f"first cause: a hang: {told}" in text for text in said), said


@pytest.mark.parametrize("moves, is_ours, ends", [(True, True, 29), (True, False, 39), (False, True, 9)])
def test_a_wait_for_a_rank_that_moves_for_ever_ends_before_the_backend_ends_it(monkeypatch, moves, is_ours, ends):
    """Without a word about that rank, gloo would. Of a wait that counts the bound is the end."""
    watch = hang.Watch.__new__(hang.Watch)
    watch.rank, watch.store, watch.main, watch.silent_s = 0, HashStore(), SimpleNamespace(ident=None), 60.0
    watch._bound, watch._waited, watch._counted, watch._own = 6.0, 0.0, 0.0, None
    watch.world, group = "ours", SimpleNamespace(process_group=lambda: None)
    watch._wait = hang.Wait("all_reduce", range(2), ["waited for", "all_reduce", group] if is_ours else None)
    watch.ran, watch._heard = 0.0, {}
    monkeypatch.setattr(hang, "report", lambda rank, main: told_by(rank))
    monkeypatch.setattr(hang, "all_groups", lambda: ["ours", "the user's"])
    monkeypatch.setattr(hang, "backend_timeouts", lambda group: [30.0 if group == "ours" else 40.0])
    said = None
    while said is None and watch._waited < 60:
        say(watch.store, 1, Word(int(watch._waited), "train.py:9 in step", 0.0 if moves else watch._waited))
        said = watch._trouble(1.0, 1.0)
    assert said == "a hang" and watch._waited == ends


def test_ranks_that_do_not_answer_are_named_with_the_line_where_they_were_seen_last():
    store = HashStore()
    say(store, 1, Word(4, "train.py:9 in step"))
    say(store, 2, Word(1))
    seen = last_seen(store, [1, 2, 3])
    assert seen == " (last seen: rank 1 at train.py:9 in step)" and last_seen(store, [2]) == ""
    assert compared({0: told_by(0)}, 2, seen) == f"rank 1 did not answer: gone, or stopped{seen}"


def test_a_rank_that_was_killed_on_another_machine_is_known_by_its_silence(monkeypatch):
    store, slept = HashStore(), []
    for rank, word in enumerate([Word(5), Word(5, "train.py:9 in step"), Word(5), Word(6, has_ended=True)]):
        say(store, rank, word)

    def sleep(seconds):
        slept.append(seconds)
        say(store, 2, Word(6))

    monkeypatch.setattr(endings, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(endings, "_rank", lambda: 0)
    monkeypatch.setattr(endings.dist, "get_world_size", lambda: 4)
    assert endings._silent(store) == "rank 1 gives no sign of life any more (last seen: rank 1 at train.py:9 in step)"
    assert endings._silent(HashStore()) is None and slept == [2.5]  # nobody says so: nobody is waited for


def test_a_group_that_the_program_has_destroyed_is_no_error_when_waits_are_ended():
    def closes():
        group = dist.new_group([0, 1])
        dist.barrier(group)  # all have made it
        dist.barrier()
        dist.destroy_process_group(group)
        endings.close(group)
        return True

    assert run_ranks(2, closes) == [True, True]


def waiting(rank, number, others, **counts):
    """A report of a rank that waits for collective `number` with others, and has begun so many of other groups."""
    key = f"collective {sorted([rank, *others])}"
    one = told_by(rank, event(number, "all_reduce", "waited for", ranks=sorted([rank, *others])))
    one["waiting"][0]["key"] = key
    return one | {"counts": {key: number} | {f"collective {ranks}": count for ranks, count in counts.items()}}


def test_a_circle_of_waits_is_a_deadlock_and_a_chain_is_none():
    circle = {0: waiting(0, 3, [1]), 1: waiting(1, 8, [2]), 2: waiting(2, 5, [0])}
    assert all(deadlocked(one, circle.get) for one in circle.values())
    outside = waiting(3, 2, [0])  # it waits for the circle, and is no part of it
    assert not deadlocked(outside, circle.get)
    for rank in range(3):  # one that has not written yet may come
        assert not deadlocked(circle[rank], {**circle, (rank + 1) % 3: None}.get)
    circle[2]["counts"]["collective [1, 2]"] = 8  # it has begun what 1 waits for
    assert not any(deadlocked(one, circle.get) for one in circle.values())


def test_a_message_that_may_have_been_forgotten_proves_nothing():
    one = {"of": "message", "kind": "the loss", "call": 7, "ranks": [0, 1], "number": 1, "state": "waited for"}
    other = one | {"kind": "the greeting"}
    mine, theirs = ({"rank": rank, "waiting": [e], "events": [e]} for rank, e in ((0, one), (1, other)))
    assert deadlocked(mine, {1: theirs}.get)
    theirs["events"] = [other | {"call": 9}] * 50
    assert not deadlocked(mine, {1: theirs}.get)
    theirs["events"] = [other] * 49 + [other | {"call": 6}]  # what it posted in that call is all there
    assert deadlocked(mine, {1: theirs}.get)


def event(number, kind, state="done", axes=("dp",), ranks=(0, 1), of="collective", ago=1.0):
    return {
        "of": of, "number": number, "kind": kind, "axes": list(axes), "ranks": list(ranks), "bytes": 4,
        "key": f"{of} {axes} {ranks}", "cause": "linear (forward)", "state": state, "seconds_ago": ago,
    }  # fmt: skip


def told_by(rank, *events, line="train.py:7 in step"):
    events = list(reversed(events))
    waiting = [one for one in events if one["state"] == "waited for"]
    return {"rank": rank, "lines": [line], "waiting": waiting, "events": events}


def test_another_collective_is_named_with_both():
    mine = told_by(0, event(1, "all_gather"), event(2, "all_reduce", "waited for"))
    theirs = told_by(1, event(1, "all_gather"), event(2, "all_to_all", "waited for"), line="train.py:9 in step")
    assert compared({0: mine, 1: theirs}, 2) == (
        "collective 2 over axis 'dp' is not the same on all ranks: rank 0 in all_reduce, asked for by linear (forward) "
        "at train.py:7 in step and rank 1 in all_to_all, asked for by linear (forward) at train.py:9 in step"
    )


def test_who_waits_elsewhere_comes_after_who_does_not():
    tp = {"axes": ("tp",)}
    one = told_by(0, event(5, "all_reduce", "waited for"))
    two = told_by(1, event(4, "all_reduce"), event(9, "all_gather", "waited for", ranks=(1, 3), **tp))
    far = told_by(3, event(8, "all_gather", ranks=(1, 3), **tp), line="train.py:30 in load")
    told = compared({0: one, 1: two, 3: far}, 4)
    first, second, last = told.split("; ")
    assert first.startswith("rank 1 is at collective 9 over axis 'tp'") and "rank 3 has come to 8" in first
    assert "train.py:30 in load" in first and "rank 1 has come to 4" in second and last.startswith("rank 2 did not")


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_agree_lost_a_connection(world):
    reports = {rank: told_by(rank, event(3, "all_reduce", "waited for")) for rank in range(world)}
    assert compared(reports, world).startswith("all ranks are at the same communication")
