"""Sends what the host reads (`item`, `tolist`, `bool`, ...) in messages of its own, which meet nothing but reads.

A read of a sharded or partial tensor is a collective, and code that one rank alone runs (`if rank == 0:
print(loss.item())`) would meet whatever the other ranks come to next: numbers would change hands, and nobody would
know. So reads do not go through the collectives of a group but through messages with a tag, between the same ranks:
a read that the others do not come to waits, and the watch says at which line (`hang.py`). Ranks that do meet compare
first what they read, from which line, and how many collectives each has made before: a read that meets another, or
that comes after ranks went apart, raises on all of them.

Only where the group moves host memory by gloo: NCCL's messages have no tags.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_trace.stack import user_line

from .._errors import CommunicationError, InternalError
from .._layouts.layout import Layout, layout_of
from .._layouts.mesh import Mesh
from .._layouts.state import PARTIAL
from .._tensor.bits import bits_of
from . import events, flight_recorder
from .flight_recorder import READS, RankGroup

_TAG = 0x5EAD
_CARRIED = 64
"""Bytes of a small value that travel with the comparison."""
_MOST_TEXT = 512
"""Bytes of what a rank says of its read, when ranks do not read the same."""


class Messages:
    """Collectives of a process group that a read needs, by messages with a tag. They are over when they return."""

    def __init__(self, group: Any) -> None:
        self._group, self._rank, self._count = group, group.rank(), group.size()
        self.brought: Tensor | None = None
        """A row of bytes from every rank that came with the comparison: what the next gather is for."""

    def size(self) -> int:
        return self._count

    def rank(self) -> int:
        return self._rank

    def _allgather_base(self, out: Tensor, part: Tensor, options: Any = None) -> _Over:
        """Gathers by doubling: after k rounds a rank has what the 2^k ranks from it on had (Bruck et al., 1997)."""
        if self.brought is not None:
            rows, self.brought = self.brought[:, : part.nbytes].contiguous(), None
            if not torch.equal(rows[self._rank], bits_of(part).cpu()):
                raise InternalError("a read gathers something else than what it brought", sent=part)
            out.view(self._count, -1).copy_(rows.view(part.dtype))
            return _OVER
        own = part.cpu().reshape(1, -1)
        held, have = own.new_empty(self._count, own.numel()), 1
        held[:1] = own
        while have < self._count:
            more = min(have, self._count - have)
            self._swap(held[:more], (self._rank - have) % self._count, held[have : have + more], self._rank + have)
            have += more
        out.view(self._count, -1).copy_(held.roll(self._rank, 0))
        return _OVER

    def alltoall_base(self, out: Tensor, sent: Tensor, of_out: list, of_sent: list, options: Any = None) -> _Over:
        """Round by round with the rank so many places further on."""
        parts, came = sent.cpu().view(-1), out.new_empty(out.numel(), device="cpu")
        sends = parts.split(of_sent or [parts.numel() // self._count] * self._count)
        takes = came.split(of_out or [came.numel() // self._count] * self._count)
        takes[self._rank].copy_(sends[self._rank])
        for step in range(1, self._count):
            to, of = (self._rank + step) % self._count, (self._rank - step) % self._count
            self._swap(sends[to], to, takes[of], of)
        out.view(-1).copy_(came)
        return _OVER

    def _swap(self, sent: Tensor, to: int, taken: Tensor, of: int) -> None:
        sending = self._group.send([sent.contiguous()], to, _TAG) if sent.numel() else _OVER
        if taken.numel():
            self._group.recv([taken], of % self._count, _TAG).wait()
        sending.wait()


class _Over:
    def wait(self, timeout: object = None) -> bool:
        return True


_OVER = _Over()


class ReadMesh(Mesh):
    """A mesh's twin, whose groups are `Messages`."""

    __slots__ = ("_beside",)

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.sizes, mesh.names, mesh.coordinate, mesh.device_mesh)
        self._beside = mesh

    def group(self, axes: tuple[int, ...]) -> Any:
        group = self._groups.get(axes)
        if group is None:
            group = self._groups[axes] = Messages(self._beside.group(axes))
        return group

    def backend(self, axes: tuple[int, ...]) -> str:
        return "reads"

    def rank_group(self, axes: tuple[int, ...], of: str = READS) -> RankGroup:
        return self._beside.rank_group(axes, READS)


def reading_mesh(mesh: Mesh) -> ReadMesh | None:
    """The twin over which values of the mesh's tensors are read; None if its groups cannot have one."""
    if mesh._reading is None:
        mesh._reading = (ReadMesh(mesh) if _has_gloo(mesh) else None,)
    return mesh._reading[0]


def _has_gloo(mesh: Mesh) -> bool:
    axis = next((axis for axis, size in enumerate(mesh.sizes) if size > 1), None)
    if axis is None or mesh.device_mesh is None:
        return False
    try:
        return mesh.group((axis,))._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False


def over(mesh: Mesh, layout: Layout) -> Layout:
    """The same layout over another mesh of the same axes."""
    return layout_of(mesh, layout.states, layout.shape)


def compare_reads(mesh: ReadMesh, layout: Layout, local: Tensor) -> None:
    """Raises CommunicationError, on all ranks of an axis, where they do not read the same, from the same line, after as
    many collectives.

    Cost: 88 bytes from every rank of each axis over which the tensor is sharded or partial. A small sum over one axis
    travels with them, and nothing after.
    """
    line = user_line()
    what = f"{list(layout.shape)} {local.dtype} {layout.states}"
    axes = [axis for axis, state in enumerate(layout.states) if not state.is_replicated and mesh.sizes[axis] > 1]
    for axis in axes:
        mesh.group((axis,)).brought = None
        own = torch.zeros(3 + _CARRIED // 8, dtype=torch.int64)
        own[0] = mesh._beside.rank_group((axis,)).count
        own[1], own[2] = zlib.crc32(what.encode()), zlib.crc32(_place(line).encode())
        carries = len(axes) == 1 and layout.states[axis] is PARTIAL and 0 < local.nbytes <= _CARRIED
        if carries:
            own[3:].view(torch.uint8)[: local.nbytes] = bits_of(local).cpu()
        rows = _gathered(own, mesh, axis)
        heads = rows[:, :3].tolist()
        if any(head != heads[0] for head in heads):
            _refuse(mesh, axis, f"{line or 'no line of a script'}, {what}", [head[0] for head in heads])
        if carries:
            mesh.group((axis,)).brought = rows[:, 3:].contiguous().view(torch.uint8)


def _gathered(own: Tensor, mesh: ReadMesh, axis: int) -> Tensor:
    """A row from every rank of the axis. It is no traffic of the program: traces do not hear of it."""
    rows = own.new_empty(mesh.sizes[axis], own.numel())
    with flight_recorder.note("read", mesh.rank_group((axis,)), own.nbytes * (mesh.sizes[axis] - 1), None):
        mesh.group((axis,))._allgather_base(rows, own)
    return rows


def _place(line: str) -> str:
    """Without the folder, which other hosts may call otherwise."""
    return line.replace("\\", "/").rpartition("/")[2]


def _refuse(mesh: ReadMesh, axis: int, own: str, made: Sequence[int]) -> None:
    text = own.encode()[-_MOST_TEXT:].ljust(_MOST_TEXT)
    told = _gathered(torch.frombuffer(bytearray(text), dtype=torch.uint8), mesh, axis)
    reads = [bytes(row.tolist()).decode(errors="replace").strip() for row in told]
    name = mesh.names[axis]
    raise CommunicationError(
        events.cause().function,
        f"the ranks along axis {name!r} do not read the same value at the same point of the program: some of them have "
        "run code that others have not",
        [
            f"rank {rank}  reads at {what}, after {count:,} collectives over axis {name!r}"
            for rank, what, count in zip(mesh._beside.rank_group((axis,)).ranks, reads, made)
        ],
        [
            ("value = loss.item()", "before `if rank == 0:`, on every rank: a small collective"),
            ("tensor.to_local()", "this rank's shard alone: no communication"),
        ],
    )
