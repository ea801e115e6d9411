"""Blocks between the ranks of one axis: both directions of a step posted together, waited for apart.

On NCCL the messages of a step are one group (`batch_isend_irecv`), so that two ranks may send to each other, and
match in the order of posting: there are no tags. A wait there is the stream's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor

from .._communication import flight_recorder
from .._communication.collectives import _wire, all_gather
from .._communication.flight_recorder import BLOCKS, STARTED
from .._layouts.mesh import Mesh

Message = tuple[int, Tensor]
"""The other rank's place on the axis, and a contiguous tensor."""


class UnderWay(NamedTuple):
    """A started transfer: its works, the tensors that they use, and its entry in the recorder."""

    works: list
    held: tuple
    noted: flight_recorder.Noted


def start(sends: Sequence[Message], receives: Sequence[Message], mesh: Mesh, axis: int, kind: str) -> UnderWay | None:
    """Posts messages to and from ranks of the axis; None if there is none. Pairs with `wait`.

    Announced as one event with as many messages as are received.
    """
    if not sends and not receives:
        return None
    group, rank_group = mesh.group((axis,)), mesh.rank_group((axis,), BLOCKS)
    received = sum(tensor.nbytes for _, tensor in receives)
    noted = flight_recorder.note(kind, rank_group, received, len(receives), STARTED)
    if not group_sends(mesh, axis):
        return UnderWay([], (sends, receives), noted)
    posted = [dist.P2POp(dist.isend, _wire(tensor), rank_group.ranks[to], group) for to, tensor in sends]
    posted += [dist.P2POp(dist.irecv, _wire(tensor), rank_group.ranks[of], group) for of, tensor in receives]
    try:
        works = dist.batch_isend_irecv(posted)
    except RuntimeError as error:
        raise noted.failed(error) from error
    return UnderWay(works, (sends, receives), noted)


def wait(started: UnderWay | None) -> None:
    """Returns when what was received may be used, and what was sent written to."""
    if started is not None:
        with started.noted.waits():
            for work in started.works:
                work.wait()


def group_sends(mesh: Mesh, axis: int) -> bool:
    """True if there are processes to send to: in a dry run there are none, and what is received is memory alone."""
    return mesh.backend((axis,)) != "fake"


def greet(mesh: Mesh, axis: int, tensor: Tensor) -> None:
    """Before the first messages of a group: NCCL makes its communicator in a collective of all ranks."""
    group = mesh.group((axis,))
    if group not in _greeted:
        if group_sends(mesh, axis) and mesh.backend((axis,)) != "gloo":
            all_gather(tensor.new_zeros(1), mesh, (axis,), "greet")
        _greeted.add(group)


_greeted: WeakSet = WeakSet()
