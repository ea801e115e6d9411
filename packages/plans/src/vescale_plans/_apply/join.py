"""Joining torch.distributed, once, and leaving it in order."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import CommunicationError, MeshError
from vescale_dtensor.engine import (
    await_namespace,
    first_ending,
    hook_breakpoints,
    mesh_of,
    raised_anywhere,
    raised_here,
    tell_endings,
    watch_for_hangs,
)
from vescale_trace.environment import count

from .._plan.fields import PlanFields
from .._plan.parts import PlanError
from .._torch_private import _abort_process_group, backend_of

# Bounds every collective: a rank that waits longer raises, naming what it waited for.
TIMEOUT = timedelta(minutes=10)
_COMES_BACK_S = 5.0
"""Seconds that a thread that waited for what was aborted is given to come back."""
LOOK_S = 1.0
"""Whoever leaves looks so often whether another rank has raised."""


def join() -> None:
    """Joins the process group that torchrun's environment names, or makes a world of one.

    On a machine with an accelerator this rank computes there, and the group has a backend for it and one for the
    host: "cpu:gloo,cuda:nccl". Started without torchrun, a line on stderr says which device that is.

    Does nothing when somebody joined already; they then also leave. A group that is
    not destroyed may abort the process at exit, so whoever joins leaves. From then on
    ranks tell each other what ended them, and what hangs, and `breakpoint()` stops all of them.
    Raises MeshError, on all ranks of a machine alike,
    when it has fewer devices than ranks.
    """
    if not dist.is_initialized():
        _join()
    tell_endings()
    watch_for_hangs()
    hook_breakpoints()


def _join() -> None:
    device = accelerator()
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:{_backend_of(device)}"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = count("RANK", 0), count("WORLD_SIZE", 1)
        if rank >= size:
            rule = f"RANK is {rank} and WORLD_SIZE {size}, in the environment: ranks count from 0"
            raise MeshError("parallelize", rule, (), [("torchrun --nproc-per-node 8 ...", "sets both")])
        if device != "cpu":
            torch.accelerator.set_device_index(_own_index(torch.accelerator.device_count()))
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        if device != "cpu":
            where = f"{device}:{torch.accelerator.current_device_index()}"
            print(f"vescale: not started by torchrun: one rank, on {where}", file=sys.stderr)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device != "cpu":
        global _ending
        _ending = _Ending()
    atexit.register(leave)


def is_fake() -> bool:
    """True if the joined world has no processes: torch's fake group, a dry run's."""
    return dist.get_backend() == "fake"


def _own_index(devices: int) -> int:
    """Returns this rank's device index, among those that it sees."""
    if devices == 1:  # the only one, or each rank is shown its own
        return 0
    ranks, own = (count(name, 0) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    if max(ranks, own + 1) > devices:
        raise MeshError(
            "parallelize",
            f"{max(ranks, own + 1)} ranks on a machine with {devices} devices: each rank computes on one of its own",
            (),
            [
                (f"torchrun --nproc-per-node {devices} ...", "a rank per device"),
                ('torch.distributed.init_process_group("gloo") first', "ranks then share what their models lie on"),
            ],
        )
    return own


def leave() -> None:
    """Ends all process groups; safe to call twice.

    NCCL waits for what is in flight, for good. So that is aborted where this rank or another one raised, who answers no
    more, and after `TIMEOUT`, which a line on stderr says.
    """
    if not dist.is_initialized():
        return
    if dist.get_backend() == "gloo":
        dist.destroy_process_group()
        return
    global _ending
    ending, _ending = _ending or _Ending(), None
    until = time.monotonic() + TIMEOUT.total_seconds()
    if not raised_here():
        ending.told.set()
    while ending.is_under_way() and time.monotonic() < until and not raised_anywhere():
        ending.join(LOOK_S)
    if raised_here() or ending.is_under_way():
        if ending.is_under_way():
            print("vescale: at the end a collective is in flight that no rank answers: it is aborted", file=sys.stderr)
        with contextlib.suppress(RuntimeError):  # of what has ended meanwhile
            _abort_process_group()
        if ending.is_under_way():  # Python would end it amid C++, which ends the process by SIGABRT
            ending.join(_COMES_BACK_S)


class _Ending(threading.Thread):
    """A thread that ends the process groups when it is told to: it waits for good where a collective is in flight.

    It stands ready from the time of joining, for a Python that ends starts no thread any more.
    """

    def __init__(self) -> None:
        super().__init__(name="vescale-leave", daemon=True)
        self.told = threading.Event()
        self.start()

    def run(self) -> None:
        self.told.wait()
        with contextlib.suppress(RuntimeError, ValueError):  # what was aborted
            dist.destroy_process_group()

    def is_under_way(self) -> bool:
        return self.told.is_set() and self.is_alive()


_ending: _Ending | None = None  # of the world that was joined, where its groups are no gloo's


def accelerator() -> str:
    """The type of this machine's accelerator, "cuda" say, that torch.distributed has a backend for; else "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and _backend_of(found.type) else "cpu"


def _backend_of(device: str) -> str | None:
    """The backend that torch knows for an accelerator; None if it is the host's (mps) or there is none."""
    name = dist.Backend.default_device_backend_map.get(device)
    return None if name == "gloo" else name


_HOSTS_TOO = frozenset({"gloo", "mpi", "ucc", "fake", "simulated"})
"""Backends that serve the host and accelerators alike: that a world has one says nothing of where its tensors lie."""


def device_type() -> str:
    """Returns the device type of the joined world's tensors.

    On the accelerator, where the world has a backend made for it. One that serves the host as well (gloo, as whoever
    joined chose) leaves it to the first model, see `choose_device`.
    """
    device = accelerator()
    backend = _served_by(device)
    if device == "cpu" or backend is None or backend in _HOSTS_TOO:
        return _chosen.get(dist.group.WORLD, "cpu")
    return device


def choose_device(model: nn.Module) -> str:
    """`device_type`; where either is possible, the world's tensors lie from now on where `model`'s parameters do."""
    first = next(model.parameters(), None)
    if first is not None and first.device.type == accelerator() and _served_by(first.device.type) is not None:
        _chosen[dist.group.WORLD] = first.device.type
    return device_type()


def _served_by(device: str) -> str | None:
    """The name of the world's backend for a type of device; None without one."""
    try:
        return backend_of(torch.device(device)).name()
    except RuntimeError:
        return None


_chosen: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by world


def make_mesh(plan: PlanFields, *, of_first: bool = False) -> DeviceMesh:
    """The plan's mesh over the joined world; the same object for the same axes.

    Outside torchrun, in a world of one, every axis has size 1, so that the same
    script runs. Raises MeshError when torchrun's world has another size.

    of_first: a plan for fewer ranks is one of the first ranks. All ranks of the world call it, and make all groups that
    the mesh may need: later the others do not.
    """
    world = dist.get_world_size()
    sizes = tuple(plan.mesh.values())
    is_part = world > plan.world_size and of_first
    if world != plan.world_size and not is_part:
        if world != 1 or "RANK" in os.environ:
            described = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
            raise MeshError(
                "parallelize",
                f"the plan's mesh needs {plan.world_size} ranks ({described}), but the world has {world}",
                (),
                [
                    (f"torchrun --nproc-per-node {plan.world_size} ...", "starts as many as the plan needs"),
                    (f"a mesh whose sizes multiply to {world}", ""),
                ],
            )
        sizes = (1,) * len(sizes)
    if (key := _key(plan, sizes)) not in _meshes:
        made = _mesh_of_first(plan, sizes) if is_part else None
        _meshes[key] = made or init_device_mesh(device_type(), sizes, mesh_dim_names=tuple(plan.mesh))
    return _meshes[key]


def _mesh_of_first(plan: PlanFields, sizes: tuple[int, ...]) -> DeviceMesh:
    mesh = DeviceMesh(device_type(), torch.arange(plan.world_size).view(sizes), mesh_dim_names=tuple(plan.mesh))
    for several in range(2, len(sizes) + 1):
        for axes in itertools.combinations(range(len(sizes)), several):
            if is_outside(plan):
                (mesh if several == len(sizes) else mesh[tuple(mesh.mesh_dim_names[axis] for axis in axes)])._flatten()
            else:
                mesh_of(mesh).group(axes)
    return mesh


def _key(plan: PlanFields, sizes: tuple[int, ...]) -> tuple:
    return dist.group.WORLD, device_type(), tuple(plan.mesh), sizes


def own_rank() -> int:
    """Returns this rank's number in the joined world."""
    return dist.get_rank()


def world_size() -> int:
    """Returns how many ranks the joined world has."""
    return dist.get_world_size()


def is_outside(plan: PlanFields) -> bool:
    """True on a rank that the plan, of the first ranks, leaves out."""
    return dist.get_rank() >= plan.world_size


def await_first(plan: PlanFields) -> None:
    """A rank that the plan leaves out waits, for however long, until rank 0 comes here as often as it did. Every rank
    of the world calls it. Raises CommunicationError where a rank ended meanwhile, or the world's store."""
    place = f"awaits/{next(_places.setdefault(dist.group.WORLD, itertools.count()))}"
    if plan.world_size >= dist.get_world_size():
        return
    store = await_namespace().store
    if dist.get_rank() == 0:
        store.set(place, b"")
    if not is_outside(plan):
        return
    store = store.clone()  # torch locks one while it waits
    while not _has_come(store, place):
        if (why := first_ending()) is not None:
            raise CommunicationError("reshape", f"a rank went away while this one, outside of the plan, waited: {why}")


def _has_come(store: dist.Store, place: str) -> bool:
    """Waits LOOK_S at most."""
    try:
        store.wait([place], timedelta(seconds=LOOK_S))
    except dist.DistStoreError:  # too late
        return False
    except RuntimeError as error:
        why = first_ending() or str(error).splitlines()[0]
        rule = f"the world's store went away while this rank, outside of the plan, waited: {why}"
        raise CommunicationError("reshape", rule) from error
    return True


_places: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()  # by world


def forget_meshes() -> None:
    """Lets go of all meshes, before their world ends."""
    _meshes.clear()


_meshes: dict[tuple, DeviceMesh] = {}


def tensor_mesh(plan: PlanFields) -> DeviceMesh:
    """Returns the mesh of this rank's tensors: the plan's, or, under a pipeline, that of its stage.

    Raises PlanError under a pipeline before `parallelize` has made the stages.
    """
    device_mesh = _meshes.get(_key(plan, tuple(plan.mesh.values()))) or make_mesh(plan)
    if plan.pipeline is None:
        return device_mesh
    mesh = _stages.get((id(device_mesh), plan.pipeline.axis))
    if mesh is None:
        raise PlanError(
            "Plan", "the stages of the pipeline are not made yet", (), [("vescale.parallelize(plan, ...) first", "")]
        )
    return mesh


def keep_stage_mesh(plan: PlanFields, mesh: DeviceMesh) -> None:
    """Says which part of the plan's mesh is this rank's stage."""
    _stages[id(make_mesh(plan)), plan.pipeline.axis] = mesh


_stages: dict[tuple[int, str], DeviceMesh] = {}  # by plan meshes, which `_meshes` keeps
