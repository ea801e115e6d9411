"""Checks that replicas of a parameter are still alike: code that writes a weight on one rank alone gets an error.

An element that one rank alone holds (a shard over tensor-parallel ranks, a part under ZeRO-3) has no replica, so that
what is written to it by its owner alone is a value like any other: `vescale.compare` of two runs finds that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, PlainTensorError
from vescale_dtensor.engine import INVARIANT, REPLICATE, Mesh, fold_objects, line_objects, local_only, place_of

from .._torch_private import is_traceable_wrapper_subclass

_LOOKED_AT = 1 << 16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(root: nn.Module, mesh: Mesh) -> None:
    """Raises PlainTensorError, on all ranks alike, when ranks that hold the same part of a parameter hold other values.

    Cost: this rank's parameters are read once, the host waits once, and two small all-gathers per mesh axis.
    """
    names = [name for name, one in root.named_parameters() if _is_replicated(one, mesh)]
    if not names or mesh.device_mesh is None:
        return
    held = dict(root.named_parameters())
    if any(held[name].is_meta for name in names):
        return
    sums = _digests([held[name] for name in names], lambda bits: bits.sum(dtype=torch.int64))
    kept = {axis: [at for at, name in enumerate(names) if _copies(held[name], axis)] for axis in range(mesh.ndim)}
    own = tuple(zlib.crc32(repr([sums[at] for at in kept[axis]]).encode()) for axis in range(mesh.ndim))
    odd = fold_objects(_odd(own, mesh), _least, mesh)
    if odd is None:
        return
    other, axis, first = odd
    here = place_of(mesh.coordinate, mesh)
    told = fold_objects({here: sums} if here in (first, other) else {}, _merged, mesh)  # all have seen the same
    apart = [names[at] for at in kept[axis] if told[first][at] != told[other][at]]
    raise PlainTensorError(
        "model",
        f"the parameter {apart[0]!r} has different values on rank {other} of {mesh} than on rank {first}, which holds "
        "the same part of it: a weight was written on only some ranks, or with different values",
        [f"parameters that differ  {len(apart)} of {len(names)}"],
        [
            ("write it on every rank, by the same values", "no `if rank == 0:` around what changes weights"),
            ("vescale.load(path, {'model': model})", "on every rank: weights of a checkpoint"),
        ],
    )


def _copies(parameter: Tensor, axis: int) -> bool:
    return parameter._layout.base.states[axis] in (INVARIANT, REPLICATE)


def _is_replicated(parameter: Tensor, mesh: Mesh) -> bool:
    return type(parameter) is DTensor and any(
        size > 1 and _copies(parameter, axis) for axis, size in enumerate(mesh.sizes)
    )


def replica(root: nn.Module, mesh: Mesh, turn: int) -> tuple[list[int], list[int]]:
    """Digests one replicated parameter, another in each turn, and says along which axes ranks hold the same; of an
    empty list if there is none."""
    held = list(root.parameters())
    turned = (held[(turn + at) % len(held)] for at in range(len(held)))
    one = next((one for one in turned if _is_replicated(one, mesh)), None)
    return ([], []) if one is None else (first_bits([one]), [axis for axis in range(mesh.ndim) if _copies(one, axis)])


def first_bits(tensors: Sequence[Tensor]) -> list[int]:
    """Digests the first elements that this rank has of each, by place. The host waits once."""
    looked = [
        one
        for one in tensors
        if one.layout is torch.strided and not one.is_meta and not is_traceable_wrapper_subclass(one)
    ]
    places = lambda bits: torch.arange(1, len(bits) + 1, device=bits.device)
    return _digests(looked, lambda bits: (bits[:_LOOKED_AT] * places(bits[:_LOOKED_AT])).sum())


def _digests(tensors: Sequence[Tensor], digest: Callable[[Tensor], Tensor]) -> list[int]:
    """Folds each tensor's local bits, as integers: exact, whatever the order of adding. Some may lie on the host."""
    made: dict[torch.device, list[tuple[int, Tensor]]] = {}
    with torch.no_grad(), local_only():
        for at, tensor in enumerate(tensors):
            flat = tensor.detach().reshape(-1)
            flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
            one = digest(flat.view(_BITS[flat.element_size()]).as_subclass(Tensor))
            made.setdefault(one.device, []).append((at, one))
        found = {at: value for row in made.values()
                 for (at, _), value in zip(row, torch.stack([one for _, one in row]).tolist())}  # fmt: skip
    return [found[at] for at in range(len(tensors))]


def _odd(own: Sequence[int], mesh: Mesh) -> tuple[int, int, int] | None:
    """Along one of this rank's lines: the first rank, by its place in the mesh, that says another thing than the first
    of the line does; the axis; and that first rank."""
    found = []
    for axis, said in enumerate(own):
        line = line_objects(said, mesh, axis)
        at = next((at for at, theirs in enumerate(line) if theirs != line[0]), None)
        if at is not None:
            here = mesh.coordinate
            first, other = (place_of((*here[:axis], one, *here[axis + 1 :]), mesh) for one in (0, at))
            found.append((other, axis, first))
    return min(found, default=None)


def _least(parts: list) -> tuple[int, int, int] | None:
    return min((part for part in parts if part is not None), default=None)


def _merged(parts: list[dict]) -> dict:
    return {place: sums for part in parts for place, sums in part.items()}
