"""The catalogue: which tensors there are, and which ranks hold what of them. Pure.

Ranks compare a hash of their catalogues. Equal ones need no exchange: every rank
can plan for all. Ranks of different pipeline stages have different ones; these
exchange them as JSON and unite them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vescale_dtensor import DTensor, InterleavedShard, Layout, Partial, RaggedShard, Replicate, Shard
from vescale_dtensor.engine import Mesh, canonical_states, layout_of, local_only

from .._errors import MismatchError, UnsafeError
from ..format._dtypes import NAMES
from ..io._memory import checksum_of
from ._state import Contents


class Holder(NamedTuple):
    """Ranks that together hold a tensor: its layout on a mesh, and the mesh's global ranks, row-major.

    Without a layout every one of the ranks holds all of it.
    """

    layout: Layout | None
    ranks: tuple[int, ...]


class Entry(NamedTuple):
    """One tensor of a state. `digest`: of a plain tensor's values, which must be the same on all ranks, else ""."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tied: tuple[str, ...]
    holders: tuple[Holder, ...]
    digest: str


@dataclass(frozen=True)
class Catalogue:
    """The tensors of a state, in its order, and its values."""

    entries: tuple[Entry, ...]
    values: Any
    plan: Any

    def to_json(self) -> bytes:
        """Everything, as other ranks need it."""
        return json.dumps(
            {"entries": [_entry_json(entry) for entry in self.entries], "values": self.values, "plan": self.plan}
        ).encode()

    def structure(self) -> bytes:
        """A hash of all that plans follow from: names, dtypes, shapes, ties, layouts and ranks; no values."""
        entries = self.entries
        places: dict[Holder, int] = {}
        columns = [
            [entry.name for entry in entries],
            [entry.dtype for entry in entries],
            [entry.shape for entry in entries],
            [entry.tied for entry in entries],
            [places.setdefault(entry.holders[0], len(places)) for entry in entries],
            [[_layout_json(layout), ranks] for layout, ranks in places],
        ]
        return blake2b(json.dumps(columns).encode(), digest_size=16).digest()

    def hash(self, structure: bytes | None = None) -> bytes:
        """The same on two ranks only where their catalogues are."""
        rest = [self.values, self.plan, [entry.digest for entry in self.entries]]
        known = self.structure() if structure is None else structure
        return blake2b(known + json.dumps(rest).encode(), digest_size=16).digest()


def catalogue_of(contents: Contents, world: int, ranks_of: Callable[[Any], list[int]]) -> Catalogue:
    """The catalogue of this rank's contents.

    Arguments: the number of ranks, and a function that gives a DeviceMesh's global ranks.

    Raises UnsafeError for tensors that cannot be stored: partial sums, and sparse, nested, quantised and meta ones.
    """
    alone = (Holder(None, tuple(range(world))),)
    known: dict[Layout, tuple[tuple[Holder, ...], tuple[int, ...]]] = {}
    ranks: dict[int, tuple[int, ...]] = {}
    ties = {name: tuple(tied) for name, tied in contents.tied.items()}
    entries = []
    with local_only():
        for name, tensor in contents.tensors.items():
            is_sharded = type(tensor) is DTensor
            dtype = NAMES.get(tensor.dtype)
            if tensor.is_meta or tensor.is_nested:
                what = "on the meta device, without values" if tensor.is_meta else "a nested tensor"
                raise UnsafeError("save", f"{name!r} is {what}: there are no bytes to store")
            if dtype is None or (not is_sharded and tensor.layout != torch.strided):
                raise UnsafeError(
                    "save", f"{name!r} is a {tensor.layout} tensor of {tensor.dtype}, which the format cannot hold",
                    (), [("save its parts as plain tensors", "")],
                )  # fmt: skip
            if is_sharded:
                layout = tensor.mesh_layout
                found = known.get(layout)
                if found is None:
                    mesh = layout.mesh
                    if id(mesh) not in ranks:
                        ranks[id(mesh)] = tuple(ranks_of(mesh.device_mesh))
                    found = (Holder(_reduced(layout, name), ranks[id(mesh)]),), tuple(layout.shape)
                    known[layout] = found
                entries.append(Entry(name, dtype, found[1], ties.get(name, ()), found[0], ""))
            else:
                shape, digest = tuple(tensor.shape), checksum_of(tensor)
                entries.append(Entry(name, dtype, shape, ties.get(name, ()), alone, digest))
    return Catalogue(tuple(entries), contents.values, contents.plan)


def _reduced(layout: Layout, name: str) -> Layout:
    if layout.is_partial:
        raise UnsafeError(
            "save", f"{name!r} is a sum that is not reduced yet: no rank holds its value", [repr(layout)],
            [("tensor.redistribute(...) to Replicate() or Shard()", "the ranks' parts are summed")],
        )  # fmt: skip
    return layout


def unite(texts: Sequence[bytes]) -> Catalogue:
    """One catalogue of the different ones of all ranks, given in rank order.

    Raises MismatchError where ranks give one name to tensors that differ in dtype, shape or plain values.
    """
    from ..format._values import merge

    found: dict[str, Entry] = {}
    decoded = [json.loads(text) for text in texts]
    for rank, fields in enumerate(decoded):
        for row in fields["entries"]:
            entry = _entry_of(row, rank)
            other = found.get(entry.name)
            if other is None:
                found[entry.name] = entry
                continue
            _check_same(other, entry, rank)
            found[entry.name] = other._replace(holders=_joined(other.holders, entry.holders))
    values = merge([fields["values"] for fields in decoded])
    return Catalogue(tuple(found.values()), values, decoded[0]["plan"])


def _check_same(a: Entry, b: Entry, rank: int) -> None:
    for what in ("dtype", "shape", "tied", "digest"):
        mine, theirs = getattr(a, what), getattr(b, what)
        if mine != theirs:
            what = "value (its checksum)" if what == "digest" else what
            raise MismatchError(
                "save",
                f"{a.name!r} is not the same on all ranks: its {what} differs",
                [f"rank {a.holders[0].ranks[0]}  {mine!r}", f"rank {rank}  {theirs!r}"],
                [
                    ("make a plain tensor the same on every rank", "it is stored once"),
                    ("distribute_tensor(tensor, mesh, placements)", "if each rank holds a part of it"),
                    ('{f"rank{rank}": tensor}', "a separate key for each rank"),
                ],
            )


def _joined(a: tuple[Holder, ...], b: tuple[Holder, ...]) -> tuple[Holder, ...]:
    """Plain tensors have one holder of several ranks; sharded ones one holder per mesh."""
    if a[0].layout is None and b[0].layout is None:
        return (Holder(None, (*a[0].ranks, *b[0].ranks)),)
    return a if b[0] in a else (*a, *b)


def _entry_json(entry: Entry) -> list[Any]:
    layout, ranks = entry.holders[0]
    return [entry.name, entry.dtype, entry.shape, entry.tied, _layout_json(layout), ranks, entry.digest]


@lru_cache(maxsize=4096)
def _layout_json(layout: Layout | None) -> Any:
    return None if layout is None else [layout.mesh.sizes, layout.mesh.names, *map(_placement_json, layout.placements)]


def _placement_json(placement: Any) -> list[Any]:
    if isinstance(placement, RaggedShard):
        return ["ragged", placement.dims, placement.local_units]
    if isinstance(placement, InterleavedShard):
        order = [] if placement.order is None else [placement.order]
        return ["interleaved", placement.dim, placement.groups, *order]
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    return ["partial"] if isinstance(placement, Partial) else ["replicate"]


_PLACEMENTS = {
    "ragged": lambda dims, units: RaggedShard(tuple(dims), tuple(units)),
    "interleaved": InterleavedShard,
    "shard": Shard,
    "replicate": Replicate,
}


def _entry_of(row: list[Any], rank: int) -> Entry:
    name, dtype, shape, tied, layout, ranks, digest = row
    shape = tuple(shape)
    if layout is None:
        holder = Holder(None, (rank,))  # whoever else has it says so itself
    else:
        sizes, names, *placements = layout
        holder = Holder(_layout(tuple(sizes), tuple(names), json.dumps(placements), shape), tuple(ranks))
    return Entry(name, dtype, shape, tuple(tied), (holder,), digest)


@lru_cache(maxsize=1024)
def _mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(sizes, names)


@lru_cache(maxsize=16384)
def _layout(sizes: tuple[int, ...], names: tuple[str, ...], placements: str, shape: tuple[int, ...]) -> Layout:
    mesh = _mesh(sizes, names)
    built = [_PLACEMENTS[kind](*rest) for kind, *rest in json.loads(placements)]
    return layout_of(mesh, canonical_states("save", built, mesh, shape), shape)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor: the shard of a DTensor, a plain tensor itself."""
    with local_only():
        return tensor.detach()
