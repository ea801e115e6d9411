"""Exchange of Python objects between ranks: verdicts, digests, shapes. For checks, not for a hot path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from .._layouts.mesh import Mesh
from . import flight_recorder
from .collectives import _failure, connection_lost
from .flight_recorder import DONE, FAILED, STARTED, WAITING

T = TypeVar("T")


def line_objects(value: object, mesh: Mesh, axis: int) -> list:
    """`value` of every rank along one axis, in rank order."""
    if mesh.sizes[axis] == 1:
        return [value]
    group = mesh.group((axis,))
    parts: list = [value] * group.size()
    if group.name() != "fake":  # in a world without processes everybody would say the same
        noted = flight_recorder.note("gather_objects", mesh.rank_group((axis,)), 0, WAITING)
        try:
            torch.distributed.all_gather_object(parts, value, group=group)
        except RuntimeError as error:
            noted[0] = FAILED
            raise _failure(error, "gather_objects", mesh, (axis,)) from error
        noted[0] = DONE
    return parts


def fold_objects(value: T, fold: Callable[[list[T]], T], mesh: Mesh) -> T:
    """Folds all ranks' values into one: `fold` makes one of those along an axis, in rank order, last axis first.

    Cost: a small all-gather per axis; where what is folded stays small, it grows with the longest axis, not with the
    ranks of the mesh.
    """
    for axis in reversed(range(mesh.ndim)):
        value = fold(line_objects(value, mesh, axis))
    return value


def gather_objects(value: object, mesh: Mesh) -> list:
    """`value` of every rank of the mesh, in the mesh's order; for a verdict of all see `fold_objects`."""
    return fold_objects([value], lambda parts: [one for part in parts for one in part], mesh)


def world_objects(value: object, operation: str, what: str) -> list:
    """`value` of every rank of the world, in rank order, where there may be no mesh yet.

    Raises CommunicationError of `operation` where a rank is gone; `what` continues "a rank went away while ...".
    Cost: a small all-gather, pickled.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_backend() == "fake":
        return [value]
    everyone: list = [value] * torch.distributed.get_world_size()
    if len(everyone) > 1:
        try:
            torch.distributed.all_gather_object(everyone, value)
        except RuntimeError as error:
            rule = f"a rank went away, or did not answer in time, while {what}"
            raise connection_lost(operation, rule, error) from error
    return everyone


class NumbersInFlight:
    """Numbers of every rank along one axis, which travel on the host's backend while the program goes on."""

    def __init__(self, numbers: Sequence[int], mesh: Mesh, axis: int) -> None:
        self._mesh, self._axes, self._kind = mesh, (axis,), "gather_numbers"
        part = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        group = mesh.group(self._axes)
        self._out = part.new_empty(group.size() * len(numbers))
        self._noted = flight_recorder.note(self._kind, mesh.rank_group(self._axes), 0, STARTED)
        self._work = group._allgather_base(self._out, part)

    def read(self) -> list[list[int]]:
        """Waits; the ranks' in rank order."""
        self._noted[0] = WAITING
        try:
            self._work.wait()
        except RuntimeError as error:
            self._noted[0] = FAILED
            raise _failure(error, self._kind, self._mesh, self._axes) from error
        self._noted[0] = DONE
        return self._out.view(self._mesh.count(self._axes), -1).tolist()


def sends_on_host(mesh: Mesh) -> bool:
    """True if its ranks are processes, or stand for some, with a backend that sends what lies on the host."""
    try:
        group = mesh.device_mesh and mesh.group((max(range(mesh.ndim), key=mesh.sizes.__getitem__),))
        return bool(group) and group._get_backend(torch.device("cpu")).name() != "fake"
    except RuntimeError:
        return False


class Apart(NamedTuple):
    """A rank, by its place in the mesh, that says something else than rank 0 does."""

    rank: int
    value: Any
    first: Any


def first_apart(value: object, mesh: Mesh) -> Apart | None:
    """The first rank whose value is not rank 0's, the same on all ranks; None if all agree. Cost: `fold_objects`."""

    def fold(parts: list[tuple[int, Any, Apart | None]]) -> tuple[int, Any, Apart | None]:
        rank, first, _ = parts[0]
        for other, theirs, apart in parts:
            if theirs != first:
                return rank, first, Apart(other, theirs, first)
            if apart is not None:
                return rank, first, apart
        return parts[0]

    return fold_objects((place_of(mesh.coordinate, mesh), value, None), fold, mesh)[2]


def place_of(coordinate: Sequence[int], mesh: Mesh) -> int:
    """A rank's place in the mesh's order."""
    place = 0
    for at, size in zip(coordinate, mesh.sizes):
        place = place * size + at
    return place
