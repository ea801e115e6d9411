"""The worker pool keeps its promises, above all when a test goes wrong."""

from __future__ import annotations

import doctest
import enum
import functools
import inspect
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
import warnings
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import vescale_testkit.ranks
from vescale_dtensor import FallbackWarning, Shard, distribute_tensor
from vescale_testkit import (
    RankError,
    RankTimeout,
    assert_ranks_agree,
    fake_world,
    free_port,
    in_turns,
    mesh_of,
    raises_on_all,
    run_ranks,
    shutdown,
    slice_of,
    worker,
    worker_pool,
)
from vescale_testkit.worker_pool import pool

OFFSET = 100


@dataclass(frozen=True)
class Point:
    x: int
    tensor: torch.Tensor

    def doubled(self) -> int:
        return 2 * self.x


class Colour(enum.Enum):
    RED = 1


class LocalError(ValueError):
    """Defined in a test module, so no worker can import it."""


class AwkwardError(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def rank_plus(value: int, *, scale: int = 1) -> int:
    return scale * (value + dist.get_rank()) + OFFSET


def pids(world_size: int) -> list[int]:
    return run_ranks(world_size, os.getpid)


def still_works() -> bool:
    def total() -> float:
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=mesh_of(2, 2).get_group(1))
        return x.item()

    return run_ranks(4, total) == [1.0, 1.0, 5.0, 5.0]


# ------------------------------------------------------------------- results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    expected = [3 * (5 + rank) + 100 for rank in range(world_size)]
    assert run_ranks(world_size, rank_plus, 5, scale=3) == expected


def test_lambdas_closures_partials_and_local_classes_travel() -> None:
    base = 7

    class Local:
        def value(self) -> int:
            return base + OFFSET

    assert run_ranks(2, lambda: base + dist.get_rank()) == [7, 8]
    assert run_ranks(2, functools.partial(rank_plus, 1, scale=2)) == [102, 104]
    assert run_ranks(2, Local().value) == [107, 107]


def test_code_that_travels_knows_its_file(monkeypatch) -> None:
    reduced = worker._Pickler.dispatch_table[types.CodeType]
    forgetful = {types.CodeType: lambda code: reduced(code.replace(co_filename="<dynamic-code>"))}  # cloudpickle 3.1.3
    monkeypatch.setattr(worker._Pickler, "dispatch_table", ChainMap(forgetful, worker._Pickler.dispatch_table))

    class Place:
        def of_inner(self):
            return (lambda: sys._getframe().f_code.co_filename)()

    def files():
        return sys._getframe().f_code.co_filename, Place().of_inner(), inspect.getsource(Place.of_inner).strip()[:13]

    assert run_ranks(2, files) == [(__file__, __file__, "def of_inner(")] * 2


def test_classes_of_a_test_module_come_back_as_themselves() -> None:
    method = Point.__dict__["doubled"]
    points = run_ranks(2, lambda: Point(dist.get_rank(), torch.arange(3)))
    assert [type(point) for point in points] == [Point, Point]
    assert [point.doubled() for point in points] == [0, 2]
    assert Point.__dict__["doubled"] is method  # not the worker's copy
    assert run_ranks(2, lambda colour: colour is Colour.RED, Colour.RED) == [True, True]
    assert run_ranks(2, lambda: Colour.RED)[1] is Colour.RED


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.nn.Parameter(torch.ones(2)),
        torch.empty(2, 3, device="meta"),
        torch.zeros(0, 4),
    ],
    ids=["scalar", "transposed", "parameter", "meta", "empty"],
)
def test_tensors_travel_both_ways(tensor: torch.Tensor) -> None:
    for result in run_ranks(2, lambda x: x, tensor):
        assert type(result) is type(tensor)
        assert (result.dtype, result.shape, result.stride(), result.device) == (
            (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        )
        assert result.requires_grad == tensor.requires_grad
        if not tensor.is_meta:
            assert torch.equal(result, tensor)


def test_large_tensors_travel_both_ways() -> None:
    tensor = torch.arange(8 << 20, dtype=torch.float32)  # 32 MiB
    results = run_ranks(4, lambda x: x + dist.get_rank(), tensor)
    for rank, result in enumerate(results):
        assert torch.equal(result, tensor + rank)


def test_many_tensors_do_not_use_up_file_descriptors() -> None:
    results = run_ranks(2, lambda: [torch.zeros(1) for _ in range(2000)])
    assert len(os.listdir("/proc/self/fd")) < 200
    assert len(results[1]) == 2000


def test_every_call_starts_from_the_same_state() -> None:
    def draw() -> tuple[torch.Tensor, bool, torch.dtype, int]:
        state = (
            torch.rand(3),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
        )
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return state

    first, second = run_ranks(2, draw), run_ranks(2, draw)
    state = assert_ranks_agree(first + second)
    assert state[1:] == (True, torch.float32, 1)


def test_what_a_call_says_of_warnings_ends_with_it() -> None:
    """Neither its filters nor that a fallback was reported: the test after it would be told another thing."""

    def gathers(action: str) -> None:
        warnings.simplefilter(action, FallbackWarning)
        torch.unique(distribute_tensor(torch.eye(4), mesh_of(2), [Shard(0)]))

    run_ranks(2, gathers, "ignore")
    raises_on_all(2, FallbackWarning, gathers, "error")
    before = run_ranks(2, lambda: len(warnings.filters))
    run_ranks(2, gathers, "ignore")
    assert run_ranks(2, lambda: len(warnings.filters)) == before


def test_processes_are_kept_between_calls() -> None:
    before = pids(4)
    start = time.perf_counter()
    for _ in range(50):
        run_ranks(4, rank_plus, 1)
    print(f"\n50 calls on 4 ranks: {1e3 * (time.perf_counter() - start):.0f} ms")
    assert pids(4) == before


def test_the_fork_server_has_one_thread() -> None:
    run_ranks(2, os.getpid)
    assert pool.server().threads in (1, -1)  # -1 where /proc is missing


# ---------------------------------------------------------------- exceptions


def test_an_exception_has_rank_traceback_and_cause() -> None:
    def fail_on_two() -> None:
        if dist.get_rank() == 2:
            error = LocalError("no such luck")
            error.add_note("noted")
            raise error

    with pytest.raises(RankError) as caught:
        run_ranks(4, fail_on_two)
    message = str(caught.value)
    assert message.startswith(f"{__name__}.{fail_on_two.__qualname__} failed first on rank 2 of 4")
    assert "LocalError: no such luck\n  noted" in message
    assert "in fail_on_two" in message
    assert "_answer" not in message
    assert "rank 3 returned" in message
    assert type(caught.value.__cause__) is LocalError
    assert caught.value.__cause__.__notes__ == ["noted"]
    assert caught.value.rank == 2


def test_the_first_failure_in_time_is_named() -> None:
    def fail_later_on_low_ranks() -> None:
        time.sleep(0.1 * (3 - dist.get_rank()))
        raise ValueError(f"from {dist.get_rank()}")

    with pytest.raises(RankError, match="failed first on rank 3 of 4") as caught:
        run_ranks(4, fail_later_on_low_ranks)
    assert str(caught.value.__cause__) == "from 3"
    assert "rank 0 raised ValueError" in str(caught.value)


def test_the_pool_is_kept_if_all_ranks_raised_by_themselves() -> None:
    assert still_works()
    before = pids(4)

    def fail() -> None:
        raise ValueError

    with pytest.raises(RankError):
        run_ranks(4, fail)
    start = time.perf_counter()
    raises_on_all(4, ValueError, fail)
    print(f"\nan exception on 4 ranks: {1e3 * (time.perf_counter() - start):.0f} ms")
    assert pids(4) == before
    assert still_works()


def test_ranks_left_in_a_collective_do_not_hide_the_cause(monkeypatch) -> None:
    monkeypatch.setattr(worker_pool, "GRACE_SECONDS", 0.5)
    before = pids(4)

    def fail_before_the_collective() -> None:
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.all_reduce(torch.zeros(1))

    start = time.monotonic()
    with pytest.raises(RankError, match="failed first on rank 1 of 4") as caught:
        run_ranks(4, fail_before_the_collective)
    assert time.monotonic() - start < 10
    assert "rank 3 was still busy" in str(caught.value)
    assert "in fail_before_the_collective" in str(caught.value)
    assert still_works()
    assert not set(before) & set(pids(4))


def test_a_world_out_of_step_is_not_used_again(monkeypatch) -> None:
    monkeypatch.setattr(worker_pool, "CHECK_SECONDS", 0.5)
    before = pids(2)

    def leave_a_collective_behind() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1), async_op=True)
        raise ValueError

    with pytest.raises(RankError):
        run_ranks(2, leave_a_collective_behind)
    assert not set(before) & set(pids(2))


def test_exceptions_and_results_that_cannot_be_pickled() -> None:
    def awkward() -> None:
        raise AwkwardError("a", "b")

    with pytest.raises(RankError, match="AwkwardError: a b") as caught:
        run_ranks(2, awkward)
    assert caught.value.__cause__ is None
    assert raises_on_all(2, AwkwardError, awkward) == "a b"
    with pytest.raises(RankError, match="a generator, cannot be pickled"):
        run_ranks(2, lambda: (x for x in range(3)))


def test_a_call_that_destroys_the_process_group_ends_its_world() -> None:
    before = pids(2)
    run_ranks(2, dist.destroy_process_group)
    assert run_ranks(2, dist.get_world_size) == [2, 2]
    assert not set(before) & set(pids(2))


def test_exit_is_an_exception_like_others() -> None:
    with pytest.raises(RankError, match="SystemExit: 3"):
        run_ranks(2, sys.exit, 3)


def test_misuse_is_refused() -> None:
    with pytest.raises(RankError, match="call it from the test process"):
        run_ranks(2, lambda: run_ranks(2, os.getpid))
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        run_ranks(0, os.getpid)


# ------------------------------------------------------------- raises_on_all


def test_raises_on_all_returns_the_message() -> None:
    def fail() -> None:
        error = LocalError("the same everywhere")
        error.add_note(f"rank {dist.get_rank()}")
        raise error

    message = raises_on_all(4, ValueError, fail, match="same every")
    assert message == "the same everywhere"
    with pytest.raises(AssertionError, match="does not match"):
        raises_on_all(2, (KeyError, LocalError), fail, match="else")


def test_raises_on_all_wants_the_type_and_message_on_all_ranks() -> None:
    def fail(ranks: set[int], text: str = "bad") -> None:
        if dist.get_rank() in ranks:
            raise ValueError(text.format(dist.get_rank()))

    with pytest.raises(AssertionError, match=r"rank 0 returned\n  rank 1 raised ValueError"):
        raises_on_all(2, ValueError, fail, {1})
    with pytest.raises(AssertionError, match=r"(?s)expected KeyError or TypeError.*in fail"):
        raises_on_all(2, (KeyError, TypeError), fail, {0, 1})
    with pytest.raises(AssertionError, match=r"(?s)not the same.*rank 0: bad 0\n  rank 1: bad 1"):
        raises_on_all(2, ValueError, fail, {0, 1}, "bad {}")


# ------------------------------------------------------- timeouts and deaths


def test_a_timeout_names_ranks_and_shows_their_stacks() -> None:
    before = pids(4)

    def sleep_on_odd_ranks() -> None:
        if dist.get_rank() % 2:
            time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankTimeout, match=r"no answer within 0.5 s from rank 1, 3 of 4") as caught:
        run_ranks(4, sleep_on_odd_ranks, timeout=0.5)
    assert time.monotonic() - start < 10
    assert caught.value.ranks == (1, 3)
    assert str(caught.value).count("in sleep_on_odd_ranks") == 2
    assert "serve_forks" not in str(caught.value)
    assert still_works()
    assert not set(before) & set(pids(4))


def test_a_timeout_in_a_collective_shows_stacks_too() -> None:
    def wait_for_rank_zero() -> None:
        if dist.get_rank() != 0:
            dist.all_reduce(torch.zeros(1))

    with pytest.raises(RankTimeout, match=r"from rank 1 of 2") as caught:
        run_ranks(2, wait_for_rank_zero, timeout=0.5)
    assert "in wait_for_rank_zero" in str(caught.value)
    assert run_ranks(2, dist.get_rank) == [0, 1]


def test_groups_of_a_mesh_do_not_wait_for_ever() -> None:
    def timeouts() -> list[float]:
        groups = [dist.group.WORLD, *mesh_of(2, 2).get_all_groups()]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return [backend.options._timeout.total_seconds() for backend in backends]

    assert set(assert_ranks_agree(run_ranks(4, timeouts))) == {30.0}


@pytest.mark.parametrize(
    ("end", "fate", "code"),
    [
        (functools.partial(os._exit, 7), "died with exit code 7", 7),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by signal 9", -9),
    ],
    ids=["exit", "kill"],
)
@pytest.mark.parametrize("in_collective", [False, True])
def test_a_dead_rank_is_named_with_its_exit_code(end, fate, code, in_collective) -> None:
    def die() -> None:
        if dist.get_rank() == 2:
            time.sleep(0.2)
            end()
        if in_collective:
            dist.all_reduce(torch.zeros(1))

    with pytest.raises(RankError, match=rf"failed first on rank 2 of 4\nthe process .*{fate}") as caught:
        run_ranks(4, die)
    assert (caught.value.rank, caught.value.exit_code) == (2, code)
    assert still_works()


def test_a_crash_shows_the_python_stack() -> None:
    def crash() -> None:
        if dist.get_rank() == 0:
            import ctypes

            ctypes.string_at(0)

    with pytest.raises(RankError, match=r"(?s)signal 11.*Segmentation fault.*in crash"):
        run_ranks(2, crash)


def test_an_interrupt_of_the_caller_ends_the_world() -> None:
    before = pids(2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, time.sleep, 30)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not set(before) & set(pids(2))


# ------------------------------------------------------------------- lifetime


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(is_running, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


def start_script(body: str) -> subprocess.Popen[str]:
    script = "import os, sys, time\nfrom vescale_testkit import run_ranks, warm_up\n"
    script += "from vescale_testkit.worker_pool import pool\n"
    environment = {key: value for key, value in os.environ.items() if key != "HOME"}
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", script + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


PRINT_PIDS = "print(*run_ranks(2, os.getpid), pool.server()._process.pid, flush=True)\n"


@in_turns(3)
@pytest.mark.parametrize("busy", [False, True])
def test_no_process_survives_a_killed_parent(busy: bool) -> None:
    script = PRINT_PIDS + ("run_ranks(2, time.sleep, 60)" if busy else "time.sleep(60)")
    with start_script(script) as parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 3
        assert all(map(is_running, workers))
        time.sleep(0.2)
        parent.kill()
        assert wait_until_gone(workers) == []


@in_turns(3)
def test_no_rank_survives_a_killed_fork_server() -> None:
    with start_script(PRINT_PIDS + PRINT_PIDS) as parent:
        first = [int(pid) for pid in parent.stdout.readline().split()]
        parent.communicate(timeout=300)
        assert wait_until_gone(first) == []
    workers = pids(2)
    pool.server()._process.kill()
    pool.server()._process.wait(10)
    assert wait_until_gone(workers) == []
    assert run_ranks(2, dist.get_rank) == [0, 1]


def test_an_ordinary_exit_is_quiet_and_leaves_nothing() -> None:
    with start_script(PRINT_PIDS) as parent:
        out, err = parent.communicate(timeout=300)
    assert (parent.returncode, err) == (0, "")
    assert wait_until_gone([int(pid) for pid in out.split()]) == []


def test_what_ranks_print_is_there_after_the_call() -> None:
    with start_script("run_ranks(1, print, 'said'); pool.server()._process.kill(); os._exit(0)") as parent:
        assert parent.communicate(timeout=300) == ("said\n", "")


def test_modules_can_be_imported_ahead(tmp_path) -> None:
    (tmp_path / "only_for_ranks.py").write_text("")
    body = f"""
        sys.path.append({str(tmp_path)!r})
        warm_up("only_for_ranks")
        print(run_ranks(2, lambda: "only_for_ranks" in sys.modules), "only_for_ranks" in sys.modules)
    """
    with start_script(body) as parent:
        assert parent.communicate(timeout=300) == ("[True, True] False\n", "")


def test_a_fork_server_that_cannot_start_is_reported() -> None:
    with start_script("warm_up('no_such_module'); run_ranks(2, os.getpid)") as parent:
        _, err = parent.communicate(timeout=300)
    assert "No module named 'no_such_module'" in err
    assert "WorldStartError: the fork server has gone" in err
    assert "exit code 1" in err


def test_shutdown_can_be_followed_by_a_new_start() -> None:
    workers = pids(2)
    shutdown()
    assert wait_until_gone(workers) == []
    shutdown()
    assert run_ranks(2, dist.get_rank) == [0, 1]


# --------------------------------------------------------------- mesh helpers


def test_a_mesh_is_made_once() -> None:
    def mesh_id(names) -> int:
        return id(mesh_of(2, 2, names=names))

    def keep() -> bool:
        first = mesh_of(2, 2, names=("dp", "tp"))
        return first is mesh_of(2, 2, names=["dp", "tp"]) and first is not mesh_of(4)

    assert run_ranks(4, keep) == [True] * 4
    assert run_ranks(4, mesh_id, ("dp", "tp")) == run_ranks(4, mesh_id, ["dp", "tp"])


def test_a_mesh_has_its_coordinates_and_groups() -> None:
    def describe() -> tuple:
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        return mesh.get_coordinate(), dist.get_process_group_ranks(mesh.get_group("dp"))

    expected = [((0, 0), [0, 2]), ((0, 1), [1, 3]), ((1, 0), [0, 2]), ((1, 1), [1, 3])]
    assert run_ranks(4, describe) == expected


def test_fake_world_has_a_size_and_leaves_nothing() -> None:
    for size in (8, 1024):
        with fake_world(size):
            assert (dist.get_world_size(), dist.get_rank()) == (size, 0)
            assert mesh_of(size // 2, 2, names=("dp", "tp")).size() == size
            dist.all_reduce(torch.ones(2))
        assert not dist.is_initialized()
    with pytest.raises(KeyError, match="mine"), fake_world(2):
        raise KeyError("mine")
    assert not dist.is_initialized()


# ------------------------------------------------------------------ slice_of


def test_slices_of_successive_days_are_the_whole(monkeypatch) -> None:
    monkeypatch.delenv("VESCALE_GRID", raising=False)
    slices = [slice_of(range(23), 5, day=day) for day in range(363, 368)]
    assert sorted(case for part in slices for case in part) == list(range(23))
    assert all(4 <= len(part) <= 5 for part in slices)
    assert slice_of("abc", 1, day=3) == ["a", "b", "c"]
    assert slice_of(range(8), 2) in ([0, 2, 4, 6], [1, 3, 5, 7])
    monkeypatch.setenv("VESCALE_GRID", "330")
    assert slice_of(range(8), 4) == [2, 6]
    monkeypatch.setenv("VESCALE_GRID", "full")
    assert slice_of(range(8), 2, day=1) == list(range(8))


def _cases_by_day(decorate: Callable[[Callable[..., None]], Callable[..., None]]) -> list[object]:
    """What ``in_turns(3)`` leaves of a decorated test on three successive days, sorted; None: it is skipped."""

    def on(day: int) -> object:
        def test_grid(*values: object) -> None:
            """Stands for a slow test."""

        marks = in_turns(3, day=day)(decorate(test_grid)).pytestmark
        if any(mark.name == "skip" for mark in marks):
            return None
        return [(*mark.args[1], mark.kwargs.get("ids")) for mark in marks if mark.name == "parametrize"]

    return sorted((on(day) for day in range(364, 367)), key=str)


def test_slow_tests_have_their_turns(monkeypatch) -> None:
    monkeypatch.delenv("VESCALE_GRID", raising=False)
    single = pytest.mark.usefixtures("monkeypatch")
    few = pytest.mark.parametrize("a", [1, 2])
    assert _cases_by_day(single) == [None, None, []]
    assert _cases_by_day(few) == [None, [(1, None)], [(2, None)]]
    grid = _cases_by_day(pytest.mark.parametrize("a", [1, 2, 3, 4], ids=["i", "ii", "iii", "iv"]))
    assert grid == [[(1, 4, ["i", "iv"])], [(2, ["ii"])], [(3, ["iii"])]]
    of_two = _cases_by_day(lambda test: few(pytest.mark.parametrize("b", "xyz")(test)))
    assert of_two == [[(b, None), (1, 2, None)] for b in "xyz"]
    monkeypatch.setenv("VESCALE_GRID", "full")
    assert _cases_by_day(single) == [[]] * 3
    assert _cases_by_day(few) == [[(1, 2, None)]] * 3


# --------------------------------------------------------- assert_ranks_agree


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([math.nan, -0.0]),
        torch.zeros((), dtype=torch.bfloat16),
        torch.zeros(0, 3),
        {"a": [1, (2.0, math.nan)], "b": None},
        Point(1, torch.ones(2)),
        torch.ones(3).numpy(),
    ],
    ids=["nan", "scalar", "empty", "nested", "dataclass", "array"],
)
def test_equal_results_agree(value: object) -> None:
    results = run_ranks(2, lambda: value)
    assert assert_ranks_agree(results) is results[0]


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        (torch.zeros(4), torch.tensor([0.0, 0, -0.0, 1]), "2 of 4 elements, .* flat index 2: 0.0 and -0.0"),
        (torch.zeros(2), torch.zeros(1, 2), r"torch.float32\[2\] and torch.float32\[1, 2\]"),
        (torch.zeros(2), torch.zeros(2).int(), r"torch.float32\[2\] and torch.int32\[2\]"),
        ({"a": [1, 2]}, {"a": [1, 3]}, r"\['a'\]\[1\]: 2 and 3"),
        ({"a": 1}, {"b": 1}, r"keys \['a'\] and \['b'\]"),
        ([1], [1, 2], "1 and 2 elements"),
        (1, 1.0, "int and float"),
        (Point(1, torch.ones(1)), Point(2, torch.ones(1)), r"\.x: 1 and 2"),
        (torch.ones(1).numpy(), torch.zeros(1).numpy(), "array"),
    ],
)
def test_a_difference_is_located(a: object, b: object, difference: str) -> None:
    with pytest.raises(AssertionError, match=f"^rank 2 of 3 differs from rank 0: result(.*){difference}"):
        assert_ranks_agree([a, a, b])


def test_the_examples_in_docstrings_hold() -> None:
    failed, tried = doctest.testmod(vescale_testkit.ranks)
    assert (failed, tried) == (0, 3)


def test_a_free_port_is_none_that_connections_are_given() -> None:
    found = {free_port() for _ in range(20)}
    assert len(found) > 10 and max(found) < 32768
    for port in found:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
