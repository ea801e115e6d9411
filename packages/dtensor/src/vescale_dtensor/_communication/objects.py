"""Exchange of Python objects between ranks: verdicts, digests, shapes. For checks, not for a hot path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from .._layouts.mesh import Mesh
from . import flight_recorder
from .endings import connection_lost

T = TypeVar("T")


def line_objects(value: object, mesh: Mesh, axis: int) -> list:
    """`value` of every rank along one axis, in rank order."""
    if mesh.sizes[axis] == 1:
        return [value]
    group = mesh.group((axis,))
    parts: list = [value] * group.size()
    if group.name() != "fake":  # in a world without processes everybody would say the same
        with flight_recorder.note("gather_objects", mesh.rank_group((axis,)), 0, None):
            torch.distributed.all_gather_object(parts, value, group=group)
    return parts


def line_numbers(numbers: Sequence[int], mesh: Mesh, axis: int) -> list[list[int]]:
    """Likewise of integers of 64 bits, as many on every rank: one all-gather of a tensor, nothing pickled."""
    count = mesh.sizes[axis]
    if count == 1 or (group := mesh.group((axis,))).name() == "fake":
        return [list(numbers)] * count
    part = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    everyone = part.new_empty(count * len(numbers))
    with flight_recorder.note("gather_numbers", mesh.rank_group((axis,)), 0, None):
        group._allgather_base(everyone, part).wait()
    return everyone.view(count, -1).tolist()


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
