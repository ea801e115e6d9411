"""Run a function on several ranks, from a test, in milliseconds.

    import torch
    from vescale_testkit import mesh_of, run_ranks

    def test_sum_over_one_axis():
        def total(value):
            mesh = mesh_of(2, 2, names=("dp", "tp"))
            x = torch.tensor([value + mesh.get_rank()])
            torch.distributed.all_reduce(x, group=mesh.get_group("dp"))
            return x.item()

        assert run_ranks(4, total, 10) == [22, 24, 22, 24]

The ranks are processes that are started once per test session (gloo, CPU, one
thread each) and then used by one test after the other; ``worker_pool.py`` tells
how.  What a test may rely on, and what not:

- The function and all functions and classes of test modules travel by value,
  so closures, lambdas and local classes work.  Module-level state of a test
  module that the function changes is gone after the call; state of installed
  modules stays, in that rank.
- Before every call each rank has the same seed in torch, random and numpy,
  gradients enabled, and float32 as the default dtype.
- ``os.environ``, ``sys.path`` and the working directory of the workers are
  those at the first call; what a test patches in its own process is not
  patched on the ranks.  What ranks print goes to the output of this process.
- A process group made by the function lives as long as the worker.  Use
  ``mesh_of``, which makes each mesh once.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor.engine import fake_store

from . import worker
from .worker import Answer, dumps, loads
from .worker_pool import pool


class RankError(RuntimeError):
    """A rank raised an exception, or its process died.

    ``__cause__`` is the exception of the first rank that failed, if it could be
    pickled.  The message has that rank's traceback.

    Attributes:
        rank: the rank that failed first, in time.
        exit_code: of its process, if it died (negative: a signal), or None.
    """

    def __init__(self, message: str, rank: int, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class RankTimeout(RankError):
    """Some rank did not answer in time, and none failed.

    Attributes:
        rank: the lowest of ``ranks``.
        ranks: those that did not answer.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message, ranks[0])
        self.ranks = ranks


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    /,
    *args: Any,
    timeout: float = 180.0,
    device: str = "cpu",
    **kwargs: Any,
) -> list[Any]:
    """Call a function on every rank of a gloo world; results in rank order.

    The ranks are processes that stay for later calls.  The default process
    group is initialised; within ``function`` use ``torch.distributed`` and
    ``mesh_of``.

    Arguments:
        world_size: number of ranks.
        function: called as ``function(*args, **kwargs)``, the same on all
            ranks.  It, its arguments and its result are pickled; a tensor
            travels with the whole of its storage.
        timeout: seconds until RankTimeout, not counting the start of the
            processes.  A collective gives up after 30 seconds by itself.
        device: "cpu", or "second": a device in host memory that behaves as a
            GPU does, with a process group that has NCCL's manners
            (``second``).  It is compiled at its first use on a machine.
            "nccl": GPUs over NCCL, which several ranks share if there are
            fewer than ranks.

    Returns:
        The results of ranks 0, 1, ..., world_size - 1.

    Raises:
        RankError: a rank raised or died; the one that did so first is named.
            The other ranks are given 5 seconds to finish, and then killed.
        RankTimeout: a rank did not answer in time; with the Python stacks of
            those that did not.
        WorldStartError: the processes could not be started.

    Communication: whatever ``function`` does; after an exception a barrier on
    each process group.

    Example:
        >>> run_ranks(2, lambda x: x + dist.get_rank(), 10)
        [10, 11]
    """
    answers = _call(world_size, function, args, kwargs, timeout, device, expected=())
    if all(answer.kind == "returned" for answer in answers):
        return [loads(answer.value or b"") for answer in answers]
    raise _error_of(answers, function, timeout)


def raises_on_all(
    world_size: int,
    exc_type: type[BaseException] | tuple[type[BaseException], ...],
    function: Callable[..., Any],
    /,
    *args: Any,
    match: str | None = None,
    timeout: float = 180.0,
    device: str = "cpu",
    **kwargs: Any,
) -> str:
    """Check that a function raises the same error on every rank.

    The messages, ``str(error)``, must be equal; notes, which may name the
    rank, are no part of them.

    Arguments:
        exc_type: the type, or a tuple of types, as for ``isinstance``.
        match: a regular expression to be found in the message.
        world_size, function, timeout, device: see ``run_ranks``.

    Returns:
        The message.

    Raises:
        AssertionError: some rank returned, raised something else or something
            with another message, or was still busy (such as in a collective)
            5 seconds after the first had raised.
        RankError: the process of a rank died.
        RankTimeout: no rank raised, and some did not answer in time.

    Example:
        >>> raises_on_all(2, ZeroDivisionError, lambda: 1 / 0)
        'division by zero'
    """
    answers = _call(world_size, function, args, kwargs, timeout, device, expected=exc_type)
    raised = [answer for answer in answers if answer.kind == "raised"]
    if any(answer.kind == "died" for answer in answers) or (
        not raised and any(answer.kind == "silent" for answer in answers)
    ):
        raise _error_of(answers, function, timeout)
    if len(raised) < world_size or not all(answer.expected for answer in raised):
        types = exc_type if isinstance(exc_type, tuple) else (exc_type,)
        names = " or ".join(kind.__qualname__ for kind in types)
        wrong = [answer for answer in raised if not answer.expected]
        raise AssertionError(
            f"{_name_of(function)}: expected {names} on each of {world_size} ranks\n"
            + "\n".join(_line(answer) for answer in answers)
            + "".join(f"\n{answer.detail}" for answer in wrong[:1])
        )
    messages = [answer.message for answer in raised]
    if len(set(messages)) > 1:
        raise AssertionError(
            f"{_name_of(function)}: the message is not the same on all ranks\n"
            + "\n".join(f"  rank {rank}: {message}" for rank, message in enumerate(messages))
        )
    if match is not None and not re.search(match, messages[0]):
        raise AssertionError(
            f"{_name_of(function)}: the message does not match\n  pattern  {match}\n  message  {messages[0]}"
        )
    return messages[0]


def warm_up(*modules: str) -> None:
    """Start importing torch for the workers now, without waiting for it.

    For a conftest: the import then runs beside the collection of tests.

    Arguments:
        modules: names of more modules that all workers are to have imported;
            without effect once the workers' fork server runs.  One worth
            naming is ``torch._dynamo``, which any optimizer imports when it is
            made: about a second in each worker otherwise.
    """
    pool.server(modules)


def shutdown() -> None:
    """End all workers; the next call starts new ones.  Done at exit as well."""
    pool.close()


_meshes: dict[tuple[tuple[int, ...], tuple[str, ...] | None], DeviceMesh] = {}
_meshes_world: object = None


def mesh_of(*sizes: int, names: Sequence[str] | None = None) -> DeviceMesh:
    """The device mesh of these sizes, on the device of the worker's world, made once per worker.

    Call it on all ranks of the world, in the same order.

    Arguments:
        sizes: ranks along each mesh axis; their product is the world size.
        names: of the axes, in the same order.

    Returns:
        The same DeviceMesh object for the same arguments, as long as the
        default process group lives.

    Communication: for a new mesh, the rendezvous of one process group per axis.

    Example:
        >>> run_ranks(4, lambda: mesh_of(2, 2, names=("dp", "tp")).get_coordinate())
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    global _meshes_world
    world = dist.group.WORLD
    if _meshes_world is not world:
        _meshes.clear()
        _meshes_world = world
    key = (sizes, None if names is None else tuple(names))
    if key not in _meshes:
        _meshes[key] = init_device_mesh(worker.device_type, sizes, mesh_dim_names=key[1])
    return _meshes[key]


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Be rank 0 of a world without other ranks, in this process.

    Collectives return at once and leave their outputs as they are: for
    measuring overhead, and for shapes.  The default process group, and all
    groups made within, are destroyed at exit.

    Arguments:
        size: of the pretended world.

    Raises:
        ValueError: this process has a default process group already.
    """
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=size)
    try:
        yield
    finally:
        _meshes.clear()
        dist.destroy_process_group()


# -------------------------------------------------------------------- internal


def _call(
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    device: str,
    *,
    expected: Any,
) -> list[Answer]:
    if worker.in_worker:
        raise RuntimeError("run_ranks was called on a rank; call it from the test process")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if device not in ("cpu", "second", "nccl"):
        raise ValueError(f'device must be "cpu", "second" or "nccl", not {device!r}')
    return pool.call(world_size, device, dumps((function, args, kwargs, expected)), timeout)


def _name_of(function: Callable[..., Any]) -> str:
    function = getattr(function, "func", function)  # functools.partial
    name = getattr(function, "__qualname__", repr(function))
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module else name


def _error_of(answers: list[Answer], function: Callable[..., Any], timeout: float) -> RankError:
    size, name = len(answers), _name_of(function)
    failed = [answer for answer in answers if answer.kind in ("raised", "died")]
    if not failed:
        silent = [answer for answer in answers if answer.kind == "silent"]
        ranks = tuple(answer.rank for answer in silent)
        stacks = "\n".join(f"rank {answer.rank}:\n{_indent(answer.detail)}" for answer in silent)
        return RankTimeout(
            f"{name}: no answer within {timeout:g} s from rank "
            f"{', '.join(map(str, ranks))} of {size}; their Python stacks:\n{stacks}",
            ranks,
        )
    # A rank that saw a broken connection saw the consequence of something else.
    first = min(failed, key=lambda answer: (answer.is_echo, answer.time))
    others = [_line(answer, first) for answer in answers if answer is not first]
    error = RankError(
        f"{name} failed first on rank {first.rank} of {size}\n"
        + (_fate(first) + "\n" if first.kind == "died" else "")
        + _indent(first.detail)
        + ("\nother ranks:\n" + "\n".join(others) if others else ""),
        first.rank,
        first.exit_code,
    )
    if first.value is not None:
        with contextlib.suppress(Exception):  # its traceback is in the message
            error.__cause__ = loads(first.value)
    return error


def _line(answer: Answer, first: Answer | None = None) -> str:
    """Says what became of one rank, in a line, and its stacks if it was stuck."""
    later = "" if first is None else f" {1e3 * (answer.time - first.time):.1f} ms later"
    if answer.kind == "returned":
        return f"  rank {answer.rank} returned"
    if answer.kind == "raised":
        short = textwrap.shorten(answer.message, 200)
        return f"  rank {answer.rank} raised {answer.type_name}{later}: {short}"
    if answer.kind == "died":
        return f"  rank {answer.rank}: {_fate(answer)}{later}"
    return f"  rank {answer.rank} was still busy{later}, and killed:\n{_indent(answer.detail, 4)}"


def _fate(answer: Answer) -> str:
    if answer.exit_code is None:
        return "the process hung up"
    if answer.exit_code < 0:
        return f"the process was killed by signal {-answer.exit_code}"
    return f"the process died with exit code {answer.exit_code}"


def _indent(text: str, width: int = 2) -> str:
    return textwrap.indent(text.rstrip(), " " * width)
