"""The engine's view of a DeviceMesh: plain tuples, this rank's coordinate, process groups on demand.

torch's `DeviceMesh` stays the public type. Its attributes cost a microsecond or
more each, so the engine keeps one `Mesh` per DeviceMesh object. A `Mesh` without
a DeviceMesh (`Mesh(sizes, names, coordinate)`) serves pure geometry.
"""

from __future__ import annotations

import atexit
import weakref
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._communication.flight_recorder import COLLECTIVES, RankGroup
from .._errors import MeshError


class Mesh:
    """Axis sizes and names, this rank's coordinate, and the groups behind them. Compared by identity."""

    __slots__ = (
        *("device_mesh", "sizes", "names", "coordinate"),
        *("_groups", "_backends", "_rank_groups", "_reading", "__weakref__"),
    )

    def __init__(
        self,
        sizes: tuple[int, ...],
        names: tuple[str, ...] | None = None,
        coordinate: tuple[int, ...] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        self.names = tuple(names) if names else tuple(f"axis{i}" for i in range(len(self.sizes)))
        self.coordinate = tuple(coordinate) if coordinate is not None else (0,) * len(self.sizes)
        self.device_mesh = device_mesh
        self._groups: dict[tuple[int, ...], object] = {}
        self._backends: dict[tuple[int, ...], str] = {}
        self._rank_groups: dict[tuple[tuple[int, ...], str], RankGroup] = {}
        self._reading: tuple | None = None  # the mesh's twin for reads, once somebody asked (`reads.py`)
        _meshes.add(self)

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def device_type(self) -> str:
        return self.device_mesh.device_type if self.device_mesh is not None else "cpu"

    def axis(self, name: str | int) -> int:
        """The index of an axis given by name or index.

        Raises MeshError for an axis that the mesh does not have.
        """
        if isinstance(name, int) and -self.ndim <= name < self.ndim:
            return name % self.ndim
        if name in self.names:
            return self.names.index(name)
        raise MeshError(
            "mesh",
            f"unknown axis {name!r}",
            [f"mesh  {self}"],
            [(f"use one of {', '.join(map(repr, self.names))}", "")],
        )

    def count(self, axes: tuple[int, ...]) -> int:
        """Ranks in the group of `axes`."""
        return self.sizes[axes[0]] if len(axes) == 1 else prod(self.sizes[axis] for axis in axes)

    def group(self, axes: tuple[int, ...]):
        """The process group of one axis, or of several flattened into one (made at first use, on all ranks)."""
        group = self._groups.get(axes)
        if group is None:
            mesh = self.device_mesh
            if len(axes) == 1:
                group = mesh.get_group(axes[0])
            else:
                names = tuple(self.names[axis] for axis in axes)
                group = mesh[names]._flatten().get_group() if len(axes) < self.ndim else mesh._flatten().get_group()
            self._check_order(axes)
            self._groups[axes] = group
        return group

    def backend(self, axes: tuple[int, ...]) -> str:
        """The name of the backend that collectives over `axes` go through, for tensors on the mesh's type of device.

        A group may have one for each type: "cpu:gloo,cuda:nccl". "" where it has none for this one.
        """
        name = self._backends.get(axes)
        if name is None:
            try:
                name = self.group(axes)._get_backend(torch.device(self.device_type)).name()
            except RuntimeError:  # the collective will say so
                name = ""
            self._backends[axes] = name
        return name

    def rank_group(self, axes: tuple[int, ...], of: str = COLLECTIVES) -> RankGroup:
        """The ranks of the group of `axes`, as the flight recorder knows them."""
        rank_group = self._rank_groups.get((axes, of))
        if rank_group is None:
            group, names = self.group(axes), [self.names[axis] for axis in axes]
            ranks = dist.get_process_group_ranks(group)
            rank_group = self._rank_groups[axes, of] = RankGroup(names, ranks, of, group, str(self))
        return rank_group

    def _check_order(self, axes: tuple[int, ...]) -> None:
        """torch numbers the ranks of a group in ascending order, whatever the order in the mesh: then a rank's place
        in the group would not be its coordinate. Raises MeshError, on every rank alike."""
        ranks = self.device_mesh.mesh
        others = [axis for axis in range(self.ndim) if axis not in axes]
        rows = ranks.permute(*others, *axes).reshape(-1, prod(self.sizes[axis] for axis in axes))
        if not bool((rows.diff(dim=1) > 0).all()):
            names = ", ".join(repr(self.names[axis]) for axis in axes)
            raise MeshError(
                "mesh",
                f"the ranks of the mesh do not ascend along axis {names}",
                [f"mesh  {self}, ranks {ranks.tolist()}"],
                [("init_device_mesh(device_type, sizes, mesh_dim_names=names)", "ranks in ascending order")],
            )

    def __repr__(self) -> str:
        return f"({', '.join(f'{name}={size}' for name, size in zip(self.names, self.sizes))})"


def _release() -> None:
    """Releases groups at exit: a process group that outlives the interpreter may abort the process, destroyed or
    not."""
    for mesh in _meshes:
        mesh._groups.clear()


_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()
atexit.register(_release)


def mesh_of(device_mesh: DeviceMesh | Mesh) -> Mesh:
    """The `Mesh` of a DeviceMesh; always the same one for the same object.

    Raises MeshError on a rank that is not part of the mesh.
    """
    if isinstance(device_mesh, Mesh):
        return device_mesh
    mesh = device_mesh.__dict__.get("_vescale_mesh")
    if mesh is None:
        coordinate = device_mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(
                "mesh",
                "this rank is not part of the mesh",
                [f"mesh  {device_mesh}"],
                [("call this only on the mesh's ranks, or make the mesh over all ranks", "")],
            )
        mesh = Mesh(tuple(device_mesh.mesh.shape), device_mesh.mesh_dim_names, tuple(coordinate), device_mesh)
        device_mesh._vescale_mesh = mesh
    return mesh
