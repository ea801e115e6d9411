"""Online resharding: the intersections of a load, executed by collectives instead of a disk.

What a rank holds already it copies. What it lacks is sent as a save would write it: the save plan says which rank is
the source of which box, and each round is one all-to-all of the intersections, in an order that both ends compute
alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._job import wait_for_save
from .format._box import Box, Piece, intersect, shape_of, split, volume, window, without
from .format._dtypes import SIZES
from .io._memory import as_bytes, view_of, without_collector
from .io._write import flat_of
from .manifest import Manifest, Stored
from .plan._catalogue import Catalogue, catalogue_of, local_of, unite
from .plan._choice import Choice, Report
from .plan._restore import Restore
from .plan._save_plan import Write, held_by, plan_writes
from .plan._state import contents_of
from .sync._sync import Session, collective_device, exchange_bytes, forget_finished, mesh_ranks, session_of

ROUND_BYTES = 8 << 20  # that one all-to-all brings to a rank; it is packed and unpacked, so that thrice that is held


class Lacking(NamedTuple):
    """A box that a rank needs and does not hold; on that rank, where it is to lie too."""

    name: str
    box: Box
    nbytes: int
    memory: Tensor | None = None
    piece: Piece | None = None


def reshard(
    source: Mapping[str, Any],
    target: MutableMapping[str, Any],
    *,
    over: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Report:
    """Fills the state `target` from the state `source`; both are in the same world, under different plans. Call it on
    every rank.

    Both are states as for `save` and `load`: {"model": model, "optimizer": optimizer, ...}. Every value is transferred
    bit for bit, without a disk. Both states are in memory meanwhile, plus the bytes of one round. The report's
    `bytes_read` are those that came from other ranks. `over` goes over the rounds, and may show how far they are.

    Raises MismatchError, UnsafeError or PeerError on all ranks alike. Communication: each byte that a rank needs and
    does not hold, once, in all-to-alls of ROUND_BYTES per rank; catalogues as for `save`, and the boxes that each rank
    lacks.
    """
    wait_for_save(raises=False)  # a session's keys are forgotten in the next, so that no two may be open at a time
    with session_of("reshard") as session, without_collector(), torch.no_grad():
        contents = contents_of(source)
        own = catalogue_of(contents, session.size, mesh_ranks)
        catalogue = _agreed(session, own)
        stored = {entry.name: Stored(entry.dtype, entry.shape, (), entry.tied) for entry in catalogue.entries}
        described = Manifest(0, "", 1, {}, stored, catalogue.values)
        restore = Restore(described, target, Choice(None, None, (), "error", "error"))
        restore.check(session.gather)
        flats = {name: flat_of(tensor) for name, tensor in contents.tensors.items()}
        held = {entry.name: held_by(entry, session.rank) for entry in own.entries}
        mine = list(_lacking(restore, held, flats))
        lacking = _exchanged(session, mine, catalogue)
        lacking[session.rank] = mine
        writes = [_by_name(plan_writes(catalogue.entries, rank)) for rank in range(session.size)]
        moved = 0
        for parts in over(list(_rounds(lacking))):
            moved += _round(parts, session.rank, writes, flats)
        restore.apply()
        session.gather("moved")
        return Report(
            "memory", 0, tuple(restore.matched), tuple(restore.missing), tuple(restore.extra), tuple(restore.skipped),
            restore.converted, moved,
        )  # fmt: skip


def _agreed(session: Session, own: Catalogue) -> Catalogue:
    odd = session.agree("catalogue", own.hash())
    forget_finished(session)
    return unite(session.gather("entries", own.to_json())) if odd else own


def _lacking(restore: Restore, held: Mapping[str, Sequence[Piece]], flats: Mapping[str, Tensor]) -> Iterator[Lacking]:
    """Copies what this rank holds to where it is to lie, and yields the rest, in parts of half a round."""
    for target, tensor in zip(restore.targets, restore.memories, strict=True):
        memory, pieces = local_of(tensor).view(-1), held.get(target.source, ())
        size = SIZES[target.stored.dtype]
        for piece in target.pieces:
            for other in pieces:
                inner = intersect(piece.box, other.box)
                if inner is not None:
                    view_of(memory, window(piece, inner)).copy_(view_of(flats[target.source], window(other, inner)))
            for rest in without(piece.box, [other.box for other in pieces]):
                for box in split(rest, -(-volume(rest) * size * 2 // ROUND_BYTES)):
                    yield Lacking(target.source, box, volume(box) * size, memory, window(piece, box))


def _exchanged(session: Session, mine: Sequence[Lacking], catalogue: Catalogue) -> list[Sequence[Lacking]]:
    """Per rank what it lacks, in the order in which it will be sent."""
    sizes = {entry.name: SIZES[entry.dtype] for entry in catalogue.entries}
    found: list[Sequence[Lacking]] = []
    for text in session.gather("lacking", json.dumps([(part.name, part.box) for part in mine]).encode()):
        boxes = [(name, tuple(map(tuple, box))) for name, box in json.loads(text)]
        found.append([Lacking(name, box, volume(box) * sizes[name]) for name, box in boxes])
    return found


def _by_name(writes: Sequence[Write]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for write in writes:
        found.setdefault(write.entry.name, []).append(write.piece)
    return found


def _rounds(lacking: Sequence[Sequence[Lacking]]) -> Iterator[list[list[Lacking]]]:
    """Per rank the parts that reach it in one all-to-all."""
    waiting = [list(reversed(parts)) for parts in lacking]
    while any(waiting):
        yield [list(_taken(parts)) for parts in waiting]


def _taken(parts: list[Lacking]) -> Iterator[Lacking]:
    room = ROUND_BYTES
    while parts and (room == ROUND_BYTES or parts[-1].nbytes <= room):
        room -= parts[-1].nbytes
        yield parts.pop()


def _round(
    parts: Sequence[Sequence[Lacking]],
    rank: int,
    writes: Sequence[Mapping[str, list[Piece]]],
    flats: Mapping[str, Tensor],
) -> int:
    """One all-to-all; returns the bytes that this rank received."""
    sent = []
    device = collective_device()
    for needs in parts:
        pieces = [  # an optimizer's step counts lie on the host, offloaded states too
            as_bytes(view_of(flats[part.name], window(piece, inner)).contiguous()).to(device)
            for part in needs
            for piece, inner in _common(part, writes[rank])
        ]
        sent.append(torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device))
    arriving = [[(part, inner) for part in parts[rank] for _, inner in _common(part, writes[other])]
                for other in range(len(parts))]  # fmt: skip
    sizes = [sum(_nbytes(part, inner) for part, inner in plan) for plan in arriving]
    for plan, data in zip(arriving, exchange_bytes(sent, sizes)):
        at = 0
        for part, inner in plan:
            values = data[at : at + _nbytes(part, inner)]
            values = values.clone() if values.storage_offset() % part.memory.element_size() else values
            values = values.view(part.memory.dtype).view(shape_of(inner))
            view_of(part.memory, window(part.piece, inner)).copy_(values)
            at += _nbytes(part, inner)
    return sum(sizes)


def _common(part: Lacking, writes: Mapping[str, list[Piece]]) -> Iterator[tuple[Piece, Box]]:
    """Yields what one rank sends of a part, in its order."""
    for piece in writes.get(part.name, ()):
        inner = intersect(part.box, piece.box)
        if inner is not None:
            yield piece, inner


def _nbytes(part: Lacking, inner: Box) -> int:
    return volume(inner) * part.nbytes // volume(part.box)
