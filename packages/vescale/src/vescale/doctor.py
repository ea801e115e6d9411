"""doctor: whether an environment can train, and what to mend where it cannot.

    vescale doctor                                          # this machine
    torchrun --nproc-per-node 4 -m vescale doctor           # and whether the ranks reach each other and are alike

A check reads one thing and says what it found; what is wrong comes with what to do. Nothing is changed. Checks never
raise: what cannot be read is a finding, too.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from vescale_dtensor.engine import OLDEST_TORCH, is_supported_torch, supported_torch, torch_release
from vescale_trace.environment import count

from ._machine import device_check, interfaces

GOOD, NOTE, BAD = "good", "note", "bad"
SHARED_MEMORY_GIB, OPEN_FILES = 1.0, 4096
SKEW_S = 1.0
TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
PORT = 29500  # torchrun's


@dataclass(frozen=True)
class Finding:
    """Result of a check: `state` is good, note (worth knowing) or bad (training fails or is wrong)."""

    check: str
    state: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Examination:
    """All findings; `str()` is the report."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return not any(finding.state == BAD for finding in self.findings)

    def as_json(self) -> list[dict[str, str]]:
        return [asdict(finding) for finding in self.findings]

    def __str__(self) -> str:
        rows = []
        for finding in self.findings:
            rows.append(f"{finding.state:<5} {finding.check:<14} {finding.found}")
            if finding.fix:
                rows.append(f"{'':<20} fix: {finding.fix}")
        bad = sum(finding.state == BAD for finding in self.findings)
        rows.append(f"{bad} of {len(self.findings)} checks need mending" if bad else "ready to train")
        return "\n".join(rows)


def examine(*, ranks: bool | None = None) -> Examination:
    """Runs every check on this machine, and, in a run of several ranks, those between them.

    Arguments:
        ranks: whether to compare ranks; by default, if torchrun's environment or a process group says that there are
            several. Then every rank must call this, and all get the same findings of that part. It costs one gather of
            a few hundred bytes, bounded by the group's timeout.
    """
    found = [finding for check in CHECKS for finding in _guarded(check)]
    several = dist.is_initialized() and dist.get_world_size() > 1 or count("WORLD_SIZE", 1) > 1
    if several if ranks is None else ranks:
        found += _guarded(between_ranks)
    return Examination(tuple(found))


def _guarded(check: Callable[[], Iterable[Finding]]) -> Iterable[Finding]:
    try:
        return list(check())
    except Exception as error:
        name = check.__name__.replace("_", " ")
        return [Finding(name, BAD, f"could not be checked: {type(error).__name__}: {error}")]


def python_and_torch() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    state = GOOD if sys.version_info >= (3, 11) else BAD
    yield Finding("python", state, version, "" if state == GOOD else "Python 3.11 or newer")
    if torch_release(torch.__version__) < OLDEST_TORCH:
        yield Finding("torch", BAD, f"{torch.__version__} is too old", 'pip install "torch>=2.11"')
    elif not is_supported_torch(torch.__version__):
        yield Finding("torch", NOTE, f"{torch.__version__}, outside of the supported {supported_torch()}")
    else:
        yield Finding("torch", GOOD, torch.__version__)


def packages() -> Iterator[Finding]:
    """The siblings that vescale requires, in the ranges that it requires."""
    wrong = []
    siblings = [one for one in map(Requirement, metadata.requires("vescale") or ()) if one.name.startswith("vescale-")]
    for sibling in siblings:
        try:
            version = metadata.version(sibling.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{sibling.name} is missing")
            continue
        if version not in sibling.specifier:
            wrong.append(f"{sibling.name} {version}, not {sibling.specifier}")
    own = metadata.version("vescale")
    if wrong:
        yield Finding("packages", BAD, "; ".join(wrong), f'pip install "vescale=={own}"')
    else:
        yield Finding("packages", GOOD, f"vescale {own} and its {len(siblings)} packages match")


def devices() -> Iterator[Finding]:
    """GPUs as the driver sees them (nvidia-ml-py), and whether torch sees them, too."""
    cards = list(_cards())
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not cards and not usable:
        yield Finding("devices", NOTE, "no GPU: ranks train on the CPU")
    elif not usable:
        yield Finding("devices", BAD, f"the driver has {len(cards)} GPU(s), torch {torch.__version__} can use none",
                      "install a build of torch for CUDA; unset CUDA_VISIBLE_DEVICES if it is empty")  # fmt: skip
    else:
        named = "; ".join(cards) or "nvidia-ml-py is not installed, so that nothing more is known"
        yield Finding("devices", GOOD, f"torch uses {usable} GPU(s): {named}")
        if importlib.util.find_spec("triton") is None:
            yield Finding("triton", NOTE, "not installed: random numbers on GPUs take the slower path",
                          "pip install triton")  # fmt: skip


def _cards() -> Iterator[str]:
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no library, no driver
        return
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            card = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(card)
            name = nvml.nvmlDeviceGetName(card)
            yield f"{name}, {memory.free / 2**30:.0f} of {memory.total / 2**30:.0f} GiB free"
    finally:
        nvml.nvmlShutdown()


def backends() -> Iterator[Finding]:
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("gloo", BAD, "torch was built without it", "a build of torch with torch.distributed")
    else:
        yield Finding("gloo", GOOD, "available")
    if torch.cuda.is_available():
        if dist.is_nccl_available():
            yield Finding("nccl", GOOD, ".".join(map(str, torch.cuda.nccl.version())))
        else:
            yield Finding("nccl", BAD, "there are GPUs, and torch was built without it", "a build of torch for CUDA")


def network() -> Iterator[Finding]:
    """The interface by which ranks reach each other: the one named, or the one of this host's name."""
    names = interfaces.names()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL: several, prefixes, "^" for all but, "=" for exactly
        wanted = [one.lstrip("^=") for one in os.environ.get(variable, "").split(",") if one]
        missing = [one for one in wanted if not any(name.startswith(one) for name in names)]
        down = [one for one in wanted if one in names and not interfaces.is_up(one)]
        if missing or down:
            what = f"names {', '.join(missing)}" if missing else f"names {', '.join(down)}, which is down"
            yield Finding("network", BAD, f"{variable} {what}; there are {interfaces.listed()}",
                          f"export {variable}={interfaces.likely()}")  # fmt: skip
            return
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        yield Finding("network", BAD, f"the host's name {host!r} leads to no address of this machine: {error}",
                      f"export GLOO_SOCKET_IFNAME={interfaces.likely()}, or name {host} in /etc/hosts")  # fmt: skip
        return
    state = NOTE if address.startswith("127.") else GOOD
    fix = f"for several machines: export GLOO_SOCKET_IFNAME={interfaces.likely()}" if state == NOTE else ""
    yield Finding("network", state, f"{host} is {address}; interfaces {interfaces.listed()}", fix)


def port() -> Iterator[Finding]:
    """Checks that the port at which ranks meet is free. Under torchrun, it is in use by this run."""
    if "MASTER_PORT" in os.environ and "RANK" in os.environ:
        yield Finding("port", GOOD, f"{os.environ['MASTER_PORT']}, taken by this run")
        return
    number = count("MASTER_PORT", PORT)
    with socket.socket() as probe, socket.socket() as other:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
        except OSError as error:
            other.bind(("", 0))
            yield Finding("port", BAD, f"{number} cannot be had: {error}",
                          f"torchrun --standalone, or --master-port {other.getsockname()[1]}")  # fmt: skip
            return
    yield Finding("port", GOOD, f"{number} is free")


def threads() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    ranks = count("LOCAL_WORLD_SIZE", 1)
    running = torch.get_num_threads()
    if running * ranks > cores:
        yield Finding("threads", NOTE, f"{ranks} ranks of {running} threads on {cores} cores get in each other's way",
                      f"export OMP_NUM_THREADS={max(1, cores // ranks)}")  # fmt: skip
    else:
        yield Finding("threads", GOOD, f"{running} per rank, {cores} cores")


def shared_memory() -> Iterator[Finding]:
    """Checks /dev/shm, by which loaders' workers and NCCL's ranks on one machine pass data."""
    free = shutil.disk_usage("/dev/shm").free / 2**30
    if free < SHARED_MEMORY_GIB:
        yield Finding("shared memory", BAD if torch.cuda.is_available() else NOTE, f"{free:.2f} GiB free in /dev/shm",
                      "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm")  # fmt: skip
    else:
        yield Finding("shared memory", GOOD, f"{free:.1f} GiB free in /dev/shm")


def open_files() -> Iterator[Finding]:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < OPEN_FILES:
        yield Finding("open files", NOTE, f"at most {limit}", f"ulimit -n {most if most > 0 else OPEN_FILES}")
    else:
        yield Finding("open files", GOOD, "unlimited" if limit < 0 else f"at most {limit}")


def clock() -> Iterator[Finding]:
    """Checks that the kernel holds the clock for synchronised (adjtimex). Timelines of several machines need it."""
    answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(256))  # modes=0: only asks
    if answer < 0:
        yield Finding("clock", NOTE, "the kernel does not say whether it is synchronised")
    elif answer == TIME_ERROR:
        yield Finding("clock", NOTE, "not synchronised with any other", "start chronyd or systemd-timesyncd")
    else:
        yield Finding("clock", GOOD, "synchronised")


CHECKS = (python_and_torch, packages, devices, backends, network, port, threads, shared_memory, open_files, clock)


def device_collectives(group: Any) -> Iterator[Finding]:
    """Checks that the accelerators reach each other, by the backend that torch has for them. `group`: of the host."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return
    backend = dist.Backend.default_device_backend_map.get(found.type, "gloo")
    if backend == "gloo":
        return
    device, done = found.type, []
    for what, failed in device_check.tried(device, backend, group):
        if failed is not None:
            yield Finding(backend, BAD, f"{what} failed {failed}", _NCCL_FIX)
            return
        done.append(what)
    yield Finding(backend, GOOD, "; ".join(done))


_NCCL_FIX = "NCCL_DEBUG=INFO says where it stops; one GPU per rank, NCCL_SOCKET_IFNAME, and 8 GiB of /dev/shm"


def between_ranks() -> Iterator[Finding]:
    """Checks that all ranks are alike, and reach each other at all: on the host, and by the device's own backend if
    there is one."""
    mine: dict[str, Any] = {
        "torch": torch.__version__,
        "vescale": metadata.version("vescale"),
        "python": ".".join(map(str, sys.version_info[:2])),
        "devices": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group("gloo")
    try:
        group = dist.new_group(backend="gloo")
        dist.barrier(group)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (mine, time.time(), socket.gethostname()), group=group)
        tried = list(device_collectives(group))
    finally:
        if joined:
            dist.destroy_process_group()
    hosts = sorted({host for _, _, host in everybody})
    yield Finding("ranks", GOOD, f"{len(everybody)} reach each other, on {len(hosts)} machine(s)")
    for what in mine:
        by_value: dict[str, list[int]] = {}
        for rank, (facts, _, _) in enumerate(everybody):
            by_value.setdefault(facts[what], []).append(rank)
        if len(by_value) > 1:
            found = "; ".join(f"{value} on ranks {_ranges(ranks)}" for value, ranks in by_value.items())
            yield Finding(f"same {what}", BAD, found, "one environment on all machines")
    yield from tried
    skew = max(when for _, when, _ in everybody) - min(when for _, when, _ in everybody)
    if skew > SKEW_S:
        yield Finding("clocks", NOTE, f"{skew:.1f} s apart", "start chronyd or systemd-timesyncd on every machine")
    else:
        yield Finding("clocks", GOOD, f"within {1e3 * skew:.0f} ms")


def _ranges(ranks: list[int]) -> str:
    is_run = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]}-{ranks[-1]}" if is_run else ", ".join(map(str, ranks))
