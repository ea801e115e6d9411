"""Joining torch.distributed, once, and leaving it in order."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import MeshError
from vescale_dtensor.engine import raised_here, tell_endings

from .plan import Plan, PlanError

# Bounds every collective: a rank that waits longer raises, naming what it waited for.
TIMEOUT = timedelta(minutes=10)


def join() -> None:
    """Joins the process group that torchrun's environment names, or makes a world of one.

    Does nothing when somebody joined already; they then also leave. A group that is
    not destroyed may abort the process at exit, so whoever joins leaves. From then on
    ranks tell each other what ended them.
    """
    if dist.is_initialized():
        tell_endings()
        return
    device = accelerator()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if device != "cpu":
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(_backend_of(device), timeout=TIMEOUT)
    else:
        dist.init_process_group(_backend_of(device), store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(leave)
    tell_endings()


def leave() -> None:
    """Ends all process groups; safe to call twice. After an error nobody answers what is pending, for which NCCL would
    wait: it is aborted."""
    if not dist.is_initialized():
        return
    if raised_here() and dist.get_backend() != "gloo":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def accelerator() -> str:
    """The type of this machine's accelerator where torch.distributed has a backend for it, else "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and _backend_of(found.type) != "gloo" else "cpu"


def _backend_of(device: str) -> str:
    return dist.Backend.default_device_backend_map.get(device, "gloo")


def make_mesh(plan: Plan) -> DeviceMesh:
    """The plan's mesh over the joined world; the same object for the same axes.

    Outside torchrun, in a world of one, every axis has size 1, so that the same
    script runs. Raises MeshError when torchrun's world has another size.
    """
    world = dist.get_world_size()
    sizes = tuple(plan.mesh.values())
    if world != plan.world_size:
        if world != 1 or "RANK" in os.environ:
            described = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
            raise MeshError(
                "parallelize",
                f"the plan's mesh needs {plan.world_size} ranks ({described}), and the world has {world}",
                (),
                [
                    (f"torchrun --nproc-per-node {plan.world_size} ...", "starts as many as the plan needs"),
                    (f"a mesh whose sizes multiply to {world}", ""),
                ],
            )
        sizes = (1,) * len(sizes)
    device = accelerator()
    if dist.get_backend() != _backend_of(device):
        device = "cpu"
    wanted = (dist.group.WORLD, device, tuple(plan.mesh), sizes)
    for known, mesh in _meshes:
        if known == wanted:
            return mesh
    mesh = init_device_mesh(device, sizes, mesh_dim_names=tuple(plan.mesh))
    _meshes.append((wanted, mesh))
    return mesh


def forget_meshes() -> None:
    """Lets go of all meshes, before their world ends."""
    _meshes.clear()


_meshes: list[tuple[tuple, DeviceMesh]] = []


def tensor_mesh(plan: Plan) -> DeviceMesh:
    """Where the tensors of this rank lie: the plan's mesh, or, under a pipeline, that of its stage.

    Raises PlanError under a pipeline before `parallelize` has made the stages.
    """
    device_mesh = make_mesh(plan)
    if plan.pipeline is None:
        return device_mesh
    mesh = _stages.get((id(device_mesh), plan.pipeline.axis))
    if mesh is None:
        raise PlanError(
            "Plan", "the stages of the pipeline are not made yet", (), [("vescale.parallelize(plan, ...) first", "")]
        )
    return mesh


def keep_stage_mesh(plan: Plan, mesh: DeviceMesh) -> None:
    """Says which part of the plan's mesh is this rank's stage."""
    _stages[id(make_mesh(plan)), plan.pipeline.axis] = mesh


_stages: dict[tuple[int, str], DeviceMesh] = {}  # by plan meshes, which `_meshes` keeps
