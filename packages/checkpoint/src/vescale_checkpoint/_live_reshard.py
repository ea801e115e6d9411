"""Online resharding: the intersections of a load, executed by collectives instead of a disk.

What a save would write is what is sent: the save plan says which rank is the source
of which box, the load's matching says which boxes every rank needs, and each round
is one all-to-all of the intersections, in an order that both ends compute alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._job import wait_for_save
from .format._box import Box, Piece, intersect, shape_of, volume, window
from .format._dtypes import SIZES
from .io._memory import as_bytes, view_of, without_collector
from .io._write import flat_of
from .manifest import Manifest, Stored
from .plan._catalogue import Catalogue, catalogue_of, local_of, unite
from .plan._choice import Choice, Report
from .plan._restore import Restore
from .plan._save_plan import plan_writes
from .plan._state import contents_of
from .sync._sync import Session, collective_device, exchange_bytes, forget_finished, mesh_ranks, session_of

ROUND_BYTES = 64 << 20  # of tensors, per rank, that one all-to-all moves


class Wanted(NamedTuple):
    """Boxes of one tensor that one rank needs."""

    name: str
    boxes: tuple[Box, ...]


def reshard(source: Mapping[str, Any], target: MutableMapping[str, Any]) -> Report:
    """Fills the state `target` from the state `source`; both are in the same world, under different plans. Call it on
    every rank.

    Both are states as for `save` and `load`: {"model": model, "optimizer": optimizer, ...}. Every value is transferred
    bit for bit, without a disk. Both states are in memory meanwhile, plus the tensors of one round.

    Raises MismatchError, UnsafeError or PeerError on all ranks alike. Communication: each byte that a rank needs, once,
    in all-to-alls of ROUND_BYTES per rank; catalogues as for `save`, and the boxes that each rank needs.
    """
    wait_for_save(raises=False)  # a session's keys are forgotten in the next, so that no two may be open at a time
    with session_of("reshard") as session, without_collector(), torch.no_grad():
        contents = contents_of(source)
        catalogue = _agreed(session, catalogue_of(contents, session.size, mesh_ranks))
        stored = {entry.name: Stored(entry.dtype, entry.shape, (), entry.tied) for entry in catalogue.entries}
        described = Manifest(0, "", 1, {}, stored, catalogue.values)
        restore = Restore(described, target, Choice(None, None, (), "error", "error"))
        restore.check(session.gather)
        wanted = _exchanged(session, restore)
        flats: dict[str, Tensor] = {}
        mine = {
            name: [(write.piece, flats.setdefault(name, flat_of(contents.tensors[name]))) for write in writes]
            for name, writes in _by_name(plan_writes(catalogue.entries, session.rank)).items()
        }
        owners = [_by_name(plan_writes(catalogue.entries, rank)) for rank in range(session.size)]
        moved = 0
        for names in _rounds(catalogue, session.size):
            moved += _round(session, names, mine, owners, wanted, restore)
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


def _exchanged(session: Session, restore: Restore) -> list[list[Wanted]]:
    """Per rank what it needs, in the order in which it will be sent."""
    mine = [(target.source, [piece.box for piece in target.pieces]) for target in restore.targets]
    return [
        [Wanted(name, tuple(tuple(map(tuple, box)) for box in boxes)) for name, boxes in json.loads(text)]
        for text in session.gather("wanted", json.dumps(mine).encode())
    ]


def _by_name(writes: Sequence[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for write in writes:
        found.setdefault(write.entry.name, []).append(write)
    return found


def _rounds(catalogue: Catalogue, ranks: int) -> Iterator[set[str]]:
    """Names of tensors that move together."""
    names: set[str] = set()
    held = 0
    for entry in catalogue.entries:
        nbytes = Stored(entry.dtype, entry.shape, ()).nbytes
        if names and held + nbytes > ROUND_BYTES * ranks:
            yield names
            names, held = set(), 0
        names.add(entry.name)
        held += nbytes
    yield names


def _round(
    session: Session,
    names: set[str],
    mine: Mapping[str, list[tuple[Piece, Tensor]]],
    owners: Sequence[Mapping[str, list[Any]]],
    wanted: Sequence[Sequence[Wanted]],
    restore: Restore,
) -> int:
    """One all-to-all; returns the bytes that this rank received."""
    sent = []
    device = collective_device()
    for needs in wanted:
        parts = [  # an optimizer's step counts lie on the host, offloaded states too
            as_bytes(view_of(flat, window(piece, inner)).contiguous()).to(device)
            for need in needs
            if need.name in names
            for box in need.boxes
            for piece, flat in mine.get(need.name, ())
            if (inner := intersect(box, piece.box)) is not None
        ]
        sent.append(torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device))
    plans = [list(_arriving(names, restore, owner)) for owner in owners]
    sizes = [sum(nbytes for _, _, _, nbytes in plan) for plan in plans]
    for plan, data in zip(plans, exchange_bytes(sent, sizes)):
        at = 0
        for index, piece, inner, nbytes in plan:
            flat = local_of(restore.memories[index]).view(-1)
            values = data[at : at + nbytes]
            values = (values.clone() if values.storage_offset() % flat.element_size() else values).view(flat.dtype)
            view_of(flat, window(piece, inner)).copy_(values.view(shape_of(inner)))
            at += nbytes
    return sum(sizes)


def _arriving(
    names: set[str], restore: Restore, owner: Mapping[str, list[Any]]
) -> Iterator[tuple[int, Piece, Box, int]]:
    """Yields what one rank sends here, in its order: target, its piece, the box, the bytes."""
    for index, target in enumerate(restore.targets):
        if target.source not in names:
            continue
        size = SIZES[target.stored.dtype]
        for piece in target.pieces:
            for write in owner.get(target.source, ()):
                inner = intersect(piece.box, write.piece.box)
                if inner is not None:
                    yield index, piece, inner, volume(inner) * size
