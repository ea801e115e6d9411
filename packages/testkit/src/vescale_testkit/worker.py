"""The far side of the worker pool: the fork server, and the ranks it forks.

The near side, and the picture of both, is ``worker_pool.py``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import pickle
import random
import re
import signal
import socket
import struct
import sys
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, NoReturn

import cloudpickle
import torch
import torch.distributed as dist

from vescale_dtensor._communication.in_flight import left_to_readers
from vescale_dtensor._dispatch import fallback

from . import one_gpu, second
from ._torch_private import all_groups

START_SECONDS = 180.0  # importing libraries in the fork server, rendezvous of a world, on a machine at its limit
COLLECTIVE_SECONDS = 30.0  # default timeout of every process group

HEADER = struct.Struct(">Q")
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vescale_testkit.worker import serve_forks; "
    "serve_forks(int(sys.argv[2]), json.loads(sys.argv[3]))"
)
# Messages of ranks that only noticed that another rank had gone.
_ECHO = re.compile(r"gloo/|Connection (closed|reset|refused)|Broken pipe|Timed out|timed out")


# ---------------------------------------------------------------- what travels


@dataclass(frozen=True)
class Answer:
    """One rank's answer to one call.

    ``time`` is CLOCK_MONOTONIC, which all processes of a machine share.
    """

    kind: Literal["returned", "raised", "died", "silent"]
    time: float
    rank: int = -1
    value: bytes | None = None  # the pickled result or exception
    type_name: str = ""
    message: str = ""
    detail: str = ""  # traceback, or Python stacks
    expected: bool = False  # the exception is of the type that was asked for
    usable: bool = True  # the rank can take another call
    exit_code: int | None = None

    @property
    def is_echo(self) -> bool:
        """True if this looks like a consequence of another rank's failure."""
        return self.kind == "raised" and _ECHO.search(self.message) is not None


_by_value: dict[str, bool] = {}  # module name -> functions and classes travel by value
_sent_classes: weakref.WeakSet[type] = weakref.WeakSet()


def _travels_by_value(module: types.ModuleType) -> bool:
    """True if a worker could not, or should not, import this module by name."""
    name, file = module.__name__, getattr(module, "__file__", None)
    if name == "__main__" or name.rpartition(".")[2].startswith(("test_", "conftest")):
        return True
    top = name.partition(".")[0]
    if file is None or top in sys.stdlib_module_names:
        return False
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            if spec.origin is None:  # a namespace, such as a plain directory in the working directory
                return True
            if spec.submodule_search_locations is None:
                return os.path.realpath(spec.origin) != os.path.realpath(file)
            return False
    return True


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with test modules by value; each module is looked at once.

    Code keeps the name of its file, which cloudpickle leaves out from 3.1.3 on: tracebacks, the user's line in errors
    and whoever reads the source of a function (a compiler) need it on a rank as in the caller.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return _code_of_file, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))
        if isinstance(obj, types.FunctionType | type):
            name = obj.__module__
            if isinstance(name, str) and name not in _by_value and name in sys.modules:
                _by_value[name] = _travels_by_value(sys.modules[name])
                if _by_value[name]:
                    cloudpickle.register_pickle_by_value(sys.modules[name])
            if isinstance(obj, type):
                _sent_classes.add(obj)
        return super().reducer_override(obj)


def _code_of_file(name: str, make: Callable[..., types.CodeType], arguments: tuple) -> types.CodeType:
    return make(*arguments).replace(co_filename=name)


def dumps(value: Any) -> bytes:
    """Pickle by value whatever lives in test modules; tensors by plain pickle."""
    with io.BytesIO() as file:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


class _ParentUnpickler(pickle.Unpickler):
    """Finds the caller's own classes in results, and leaves them as they are.

    cloudpickle already maps a class that went to a worker and came back to the
    same class object, but then overwrites its methods with the worker's copies.
    """

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if name == "_class_setstate" and module.startswith("cloudpickle"):
            return lambda cls, state: cls if cls in _sent_classes else found(cls, state)
        return found


def loads(value: bytes) -> Any:
    """Unpickle, in the test process, what a rank sent."""
    return _ParentUnpickler(io.BytesIO(value)).load()


# ---------------------------------------------------------------- fork server


def serve_forks(command_fd: int, modules: list[str]) -> NoReturn:
    """Main of the fork server: serve 'fork' and 'reap' until the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # no collection of a rank walks, and so copies, what all of them share
    gc.enable()
    command = socket.socket(fileno=command_fd)
    children: set[int] = set()
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(command, 65536, 253)
        except ConnectionError:
            message = b""
        if not message:
            break
        request = json.loads(message)
        if "fork" in request:
            pids = _fork_world(request["fork"], request["device"], fds, command)
            children.update(pids)
            reply = {"pids": pids, "threads": _count_threads()}
        else:
            if request["kill"]:
                _kill(request["reap"])
            reply = {"codes": _reap(request["reap"], request["seconds"])}
            children.difference_update(request["reap"])
        command.sendall(json.dumps(reply).encode())
    _kill(children)
    _reap(children, 1.0)
    os._exit(0)


def _count_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return -1


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap(pids: Iterable[int], seconds: float) -> dict[int, int | None]:
    """Exit codes; whoever is still running after so many seconds is killed."""
    codes: dict[int, int | None] = {}
    waiting = list(pids)
    deadline, killed = time.monotonic() + seconds, False
    while waiting:
        for pid in list(waiting):
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                done, status = pid, None
            if done:
                waiting.remove(pid)
                codes[pid] = None if status is None else os.waitstatus_to_exitcode(status)
        if waiting:
            if time.monotonic() > deadline:
                if killed:
                    break
                _kill(waiting)
                deadline, killed = time.monotonic() + 1.0, True
            time.sleep(0.002)
    return codes


def _fork_world(size: int, device: str, fds: list[int], command: socket.socket) -> list[int]:
    """Fork one process per rank; ``fds`` has its control socket and its stack file."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(16, 2 * size))
    port = listener.getsockname()[1]
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _die_with_parent()
                command.close()
                control_fd, stack_fd = fds[2 * rank : 2 * rank + 2]
                for fd in fds:
                    if fd not in (control_fd, stack_fd):
                        os.close(fd)
                if rank != 0:
                    listener.close()
                control = socket.socket(fileno=control_fd)
                store_fd = listener.detach() if rank == 0 else None
                _work(rank, size, device, control, stack_fd, port, store_fd)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    listener.close()
    for fd in fds:
        os.close(fd)
    return pids


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


# --------------------------------------------------------------------- a rank

in_worker = False
device_type = "cpu"
"""Device type of this worker's world: "cpu", "second" or "cuda"."""


def _work(
    rank: int, size: int, device: str, control: socket.socket, stack_fd: int, port: int, store_fd: int | None
) -> None:
    """Main of a rank: join the world, then answer calls until the caller is gone."""
    global in_worker, device_type
    in_worker, device_type = True, "cuda" if device == "nccl" else device
    faulthandler.enable(stack_fd)
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=True, chain=False)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    try:
        if device == "second":
            second.register()
            sys.setswitchinterval(0.001)  # its threads pass messages on
        elif device == "nccl":
            one_gpu.prepare(rank, size)
        # new_group() does not inherit the timeout of the world.
        dist.distributed_c10d.default_pg_timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            size,
            is_master=rank == 0,
            timeout=timedelta(seconds=START_SECONDS / 2),
            master_listen_fd=store_fd,
        )
        dist.init_process_group(
            {"cpu": "gloo", "nccl": "cpu:gloo,cuda:nccl"}.get(device, device),
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        answer = Answer("returned", time.monotonic(), rank)
    except BaseException as error:
        answer = _raised(rank, error, ())
    _send(control, answer)
    while (request := _receive(control)) is not None:
        _send(control, _answer(rank, request))
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(rank: int, request: bytes) -> Answer:
    """Do one call from a defined state: seeds, grad mode, dtype, threads, warnings."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    fallback.reported.clear()
    expected: tuple[type[BaseException], ...] = ()
    try:
        function, args, kwargs, expected = pickle.loads(request)
        with warnings.catch_warnings():
            value = function(*args, **kwargs)
        if device_type == "second":
            for gather in tuple(left_to_readers):  # to readers that did not come
                gather.wait()
            second.check_at_rest()
        elif device_type == "cuda":
            torch.cuda.synchronize()  # an error of its kernels is this call's
    except BaseException as error:
        answer = _raised(rank, error, expected)
    else:
        done = time.monotonic()
        try:
            answer = Answer("returned", done, rank, dumps(value))
        except BaseException as error:
            error.add_note(f"the result, a {type(value).__name__}, cannot be pickled")
            answer = _raised(rank, error, ())
    sys.stdout.flush()  # so that pytest shows it with the test that it belongs to
    sys.stderr.flush()
    return replace(answer, usable=dist.is_initialized())


def _raised(rank: int, error: BaseException, expected: tuple[type[BaseException], ...]) -> Answer:
    moment = time.monotonic()
    own = error.__traceback__
    if own is not None and own.tb_next is not None:
        own = own.tb_next  # without the frame of _answer
    detail = "".join(traceback.format_exception(type(error), error, own))
    try:
        value = dumps(error)
        pickle.loads(value)
    except Exception:
        value = None  # the traceback has to do
    try:
        message = str(error)
    except Exception:
        message = "(its __str__ raised)"
    return Answer(
        "raised",
        moment,
        rank,
        value,
        type_name=type(error).__qualname__,
        message=message,
        detail=detail,
        expected=isinstance(error, expected),
    )


def _send(control: socket.socket, answer: Answer) -> None:
    payload = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
    control.sendall(HEADER.pack(len(payload)))
    control.sendall(payload)


def _receive(control: socket.socket) -> bytes | None:
    """The next request, or None when the caller is gone."""
    header = _receive_exactly(control, HEADER.size)
    return None if header is None else _receive_exactly(control, HEADER.unpack(header)[0])


def _receive_exactly(control: socket.socket, length: int) -> bytes | None:
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        try:
            count = control.recv_into(view)
        except ConnectionError:
            return None
        if not count:
            return None
        view = view[count:]
    return bytes(buffer)


def check_groups(seconds: float) -> None:
    """Runs on every rank: a barrier on each process group, in order of creation."""
    if device_type == "second":
        second.forget_undelivered()
    for group in all_groups():
        options = dist.BarrierOptions()
        options.device = torch.device(device_type)
        options.timeout = timedelta(seconds=seconds)
        group.barrier(options).wait(timedelta(seconds=seconds))
