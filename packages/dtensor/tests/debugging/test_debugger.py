"""The debugger of all ranks: lockstep, who does not come, who goes, and that numbers stay as they are."""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import vescale_dtensor
from vescale_dtensor import CommunicationError, MeshError, Replicate, Shard, distribute_tensor
from vescale_dtensor._debugger import prompt, session
from vescale_dtensor._debugger.guard import WHOLE_GROUP
from vescale_dtensor._rules.registry import TABLE
from vescale_dtensor.engine import hook_breakpoints, unstopped
from vescale_testkit import in_turns, mesh_of, run_ranks


@contextlib.contextmanager
def typed(*lines: str):
    """In place of a person at a terminal: what is typed, and what the terminal shows."""
    before = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = io.StringIO("".join(f"{line}\n" for line in lines)), io.StringIO()
    try:
        yield sys.stdout
    finally:
        sys.stdin, sys.stdout = before


def sharded(*shape: int):
    """0, 1, 2, ... on a line of all ranks, cut in the first dim."""
    count = dist.get_world_size()
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return distribute_tensor(whole, mesh_of(count, names=("tp",)), [Shard(0)])


# What takes a group and is no collective of all its ranks: between two of them, or about the group itself.
_BESIDE = """
    send recv isend irecv send_object_list recv_object_list destroy_process_group get_backend get_backend_config
    get_backend_impl get_rank get_world_size get_group_rank get_global_rank get_process_group_ranks new_subgroups
    set_timeout shrink_group
""".split()


def test_all_collectives_of_this_torch_are_agreed_upon_before_they_begin() -> None:
    names = [name for name in distributed_c10d.__all__ if type(vars(distributed_c10d).get(name)) is FunctionType]
    takes = {name for name in names if "group" in inspect.signature(getattr(distributed_c10d, name)).parameters}
    assert len(takes) > 20
    assert takes - set(WHOLE_GROUP) <= set(_BESIDE)
    parts = {name for name in takes - set(_BESIDE) if "object" not in name}
    torchs = [function for function in TABLE if getattr(function, "__module__", "") == distributed_c10d.__name__]
    known = {function.__name__ for function in torchs}
    assert parts - known <= {"barrier", "monitored_barrier"}  # the others refuse DTensors, or leave them as they are


def test_a_world_of_one_stops_at_the_line_of_the_call() -> None:
    def callers_function() -> int:
        value = 3
        vescale_dtensor.breakpoint()
        value += 1
        return value

    with typed("p value", "value = 10", "n", "n", "p value", "c") as screen:
        assert callers_function() == 11
    text = screen.getvalue()
    assert "callers_function()\n-> vescale_dtensor.breakpoint()\n" in text
    assert text.index("-> value += 1") < text.index("-> return value") < text.index("11")
    assert sys.gettrace() is None


def test_a_rank_that_is_none_cannot_drive() -> None:
    with pytest.raises(MeshError, match="rank 1 of a world of 1"):
        vescale_dtensor.breakpoint(rank=1)


@pytest.mark.parametrize("driver", [0, 2])
def test_what_is_typed_is_executed_by_all_ranks(driver: int) -> None:
    def run():
        x = sharded(8, 2)
        rank = dist.get_rank()
        noted = []
        lines = [
            "p x.shape",
            "p x",
            "x.sum().item()",
            "print(x[7, 1].item())",
            "noted.append(x.mean().item())",
            "p rank",
            "p 1 / 0",
            "p x.full_tensor().sum() if rank == 3 else 0",
            "torch.distributed.barrier() if rank == 3 else 0",
            "p x.max().item() + 1",
            "n",
            "p y.sum().item()",
            "u",
            "p 'above'",
            "d",
            "interact",
            "c",
        ]
        with typed(*lines if rank == driver else ()) as screen:
            vescale_dtensor.breakpoint(rank=driver)
            y = x * 2
        return screen.getvalue(), noted, y.sum().item(), sys.gettrace() is None

    found = run_ranks(4, run)
    for rank, (text, noted, total, untraced) in enumerate(found):
        assert noted == [7.5] and total == 240 and untraced
        assert rank == driver or text == ""
    text = found[driver][0]
    others = [rank for rank in range(4) if rank != driver]
    assert "run()\n-> vescale_dtensor.breakpoint(rank=driver)\n" in text
    assert "torch.Size([8, 2])" in text
    assert "tensor([[ 0.,  1.]" in text and "[14., 15.]]" in text and "S(0) on (tp=4))" in text
    assert f"of 4) 120.0\n(rank {driver}" in text
    assert f"of 4) 15.0\n(rank {driver}" in text
    assert f"of 4) {driver}\n" + "".join(f"rank {rank}: {rank}\n" for rank in others) in text
    assert "*** ZeroDivisionError: division by zero\n(rank" in text
    assert "all_gather over axis 'tp', asked for by full_tensor (forward) was not begun" in text
    assert "barrier was not begun: rank 0 has executed the command without it" in text
    assert f"of 4) 16.0\n(rank {driver}" in text
    assert "-> y = x * 2" in text
    assert f"of 4) 240.0\n(rank {driver}" not in text  # y is not there before its line has run
    assert "NameError: name 'y' is not defined" in text
    assert "interact: not while ranks go in lockstep" in text


def test_a_rank_that_is_elsewhere_is_named_and_its_collectives_are_its_own() -> None:
    def run():
        session.ARRIVAL_SECONDS = 0.5
        x = sharded(6)
        rank, text, kept = dist.get_rank(), "", 0
        vescale_dtensor.engine.watch_for_hangs()
        lines = ["p x.sum().item()", "dist.barrier()", "p x", "p x.to_local()", "kept = 5", "c"]
        if rank != 1:
            with typed(*lines if rank == 0 else ()) as screen:
                vescale_dtensor.breakpoint()
                text = screen.getvalue()
            assert kept == 5
        return text, x.full_tensor().tolist(), x.sum().item()

    found = run_ranks(3, run)
    assert [one[1:] for one in found] == [([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 15.0)] * 3
    text = found[0][0]
    assert "vescale: rank 1 has not come to this line: it is at " in text and "in all_gather over axis tp" in text
    assert "was not begun: ranks [1] do not stand at this line" in text
    assert "barrier was not begun: ranks [1] do not stand at this line" in text
    assert "local=tensor([0., 1.])" in text and "tensor([0., 1.])\n" in text


@in_turns(3)
def test_a_rank_that_comes_late_executes_what_it_missed() -> None:
    def run():
        session.ARRIVAL_SECONDS = 0.5
        rank, value = dist.get_rank(), 1
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["test/come"])
        x = sharded(4)
        lines = ["value = 7", "store.set('test/come', '1')", "import time; time.sleep(2)", "p rank", "p x.sum().item()"]
        with typed(*lines if rank == 0 else (), "c") as screen:
            vescale_dtensor.breakpoint()
        return screen.getvalue(), value, x.sum().item()

    found = run_ranks(2, run)
    assert [one[1:] for one in found] == [(7, 6.0)] * 2
    assert "rank 1 has come, and executes what was typed until now" in found[0][0]


def test_who_drives_but_does_not_come_is_not_waited_for() -> None:
    def run():
        session.ARRIVAL_SECONDS = 0.2
        with typed() as screen:
            if dist.get_rank() == 1:
                vescale_dtensor.breakpoint()
        return screen.getvalue()

    said = "vescale: rank 0 did not come to this line, rank 1 goes on (vescale.breakpoint(rank=1) drives from here)\n"
    assert run_ranks(2, run) == ["", said]


@in_turns(3)
def test_thinking_longer_than_a_collective_may_take_breaks_nothing() -> None:
    def run():
        from datetime import timedelta
        from time import sleep

        class Slow(io.StringIO):
            def readline(self, *args):
                sleep(4)
                return super().readline(*args)

        group = dist.new_group(timeout=timedelta(seconds=3))
        one = torch.ones(())
        dist.all_reduce(one, group=group)
        with typed() as screen:
            sys.stdin = Slow("dist.all_reduce(one, group=group)\nc\n")
            vescale_dtensor.breakpoint()
        dist.all_reduce(one, group=group)
        return one.item(), "***" in screen.getvalue() and screen.getvalue()

    assert run_ranks(2, run) == [(8.0, False)] * 2


def test_after_long_silence_all_go_on() -> None:
    def run():
        import os

        os.environ["VESCALE_BREAKPOINT_SECONDS"] = "0.3"
        read, write = os.pipe()
        try:
            with typed() as screen, os.fdopen(read) as silent:
                sys.stdin = silent
                vescale_dtensor.breakpoint()
        finally:
            os.close(write)
            del os.environ["VESCALE_BREAKPOINT_SECONDS"]
        return screen.getvalue()

    assert "nothing was typed for 0.3 s (VESCALE_BREAKPOINT_SECONDS): going on" in run_ranks(2, run)[0]


def falls_silent() -> None:
    """This rank, as one whose process was killed: no beat any more; until the others are done."""
    prompt.state.prompts[1]._stop._beats.close()
    dist.distributed_c10d._get_default_store().wait(["test/done"])


class Thinking(io.StringIO):
    """A person who does something before the first line is typed."""

    def __init__(self, first, *lines: str) -> None:
        super().__init__("".join(f"{line}\n" for line in lines))
        self.first = first

    def readline(self, *args):
        first, self.first = self.first, lambda: None
        first()
        return super().readline(*args)


def test_a_rank_that_is_gone_while_a_person_thinks_is_named() -> None:
    def run():
        session.GONE_SECONDS, session.BEAT_SECONDS = 3.0, 0.2
        rank = dist.get_rank()

        def until_told() -> None:
            while "gone" not in sys.stdout.getvalue():
                session.wait(0.1)

        receive = session.Stop.receive
        if rank == 2:
            session.Stop.receive = lambda stop: falls_silent() or "c\n"
        with typed() as screen:
            sys.stdin = Thinking(until_told, "dist.barrier()", "p rank", "c")
            vescale_dtensor.breakpoint(rank=1)
        session.Stop.receive = receive
        dist.distributed_c10d._get_default_store().set("test/done", "1")
        dist.barrier()
        return screen.getvalue()

    text = run_ranks(3, run)[1]
    assert "vescale: rank 2 is gone, while the others stand here" in text
    assert "barrier was not begun: ranks [2] do not stand at this line" in text
    assert "of 3) 1\nrank 0: 0\n" in text


def test_when_the_driver_is_gone_the_others_say_so() -> None:
    def run():
        session.GONE_SECONDS, session.BEAT_SECONDS = 3.0, 0.2
        rank = dist.get_rank()
        gone = pytest.raises(CommunicationError) if rank == 0 else contextlib.nullcontext()
        with typed(), gone as error:
            sys.stdin = Thinking(falls_silent, "c")
            vescale_dtensor.breakpoint(rank=1)
        dist.distributed_c10d._get_default_store().set("test/done", "1")
        return "" if error is None else str(error.value)

    expected = "breakpoint: rank 1, where the debugger is driven, is gone: no sign of it for 3 s\nfix: start again"
    assert run_ranks(2, run) == [expected, ""]


def test_pythons_own_breakpoint_stops_all_ranks() -> None:
    def run():
        before, sys.breakpointhook = sys.breakpointhook, sys.__breakpointhook__
        hook_breakpoints()
        x = sharded(4)
        try:
            with typed("p x.sum().item()", "c") as screen:
                breakpoint()
        finally:
            sys.breakpointhook = before
        return screen.getvalue(), x.sum().item()

    (text, total), other = run_ranks(2, run)
    assert "-> breakpoint()\n" in text and "of 2) 6.0\n" in text and total == 6 and other == ("", 6)


def test_where_code_runs_on_samples_nobody_stops_and_nothing_prints(capsys) -> None:
    def code() -> None:
        import pdb

        print("line")
        breakpoint()
        pdb.set_trace()
        vescale_dtensor.breakpoint()

    with unstopped("the planner ran the model on samples"):
        code()
        code()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vescale: the planner ran the model on samples and did not stop at ") and err.count(":") == 4
    assert err.endswith(" and kept back 2 printed lines\n")


def test_stepping_skips_the_frames_of_torch_and_ours() -> None:
    def run():
        from torch import nn

        class Inner(nn.Module):
            def forward(self, x):
                return x + 1

        inner, x = Inner(), distribute_tensor(torch.ones(4), mesh_of(2, names=("tp",)), [Replicate()])
        with typed("s", "s", "s", "w", "c") as screen:
            vescale_dtensor.breakpoint()
            y = inner(x)
        return screen.getvalue(), y.sum().item()

    (text, total), _ = run_ranks(2, run)
    assert total == 8 and "forward()\n-> return x + 1" in text
    assert "vescale_dtensor/_" not in text
