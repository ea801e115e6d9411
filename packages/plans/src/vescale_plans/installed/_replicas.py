"""Checks that replicas are still alike: an error for code that writes a weight on one rank alone, and for memory that
loses a bit.

An element that one rank alone holds (a shard over tensor-parallel ranks, a part under ZeRO-3) has no replica, so that
what is written to it by its owner alone is a value like any other: `vescale.compare` of two runs finds that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, PlainTensorError
from vescale_dtensor.engine import INVARIANT, REPLICATE, Mesh, fold_objects, line_objects, place_of
from vescale_trace.in_step import digests


class Replicas:
    """The tensors of a model, and of the optimizers that step on it, of which several ranks hold the same part; and
    which parameters are trained, as all ranks do, for a gradient is a sum over ranks."""

    def __init__(self, root: nn.Module, mesh: Mesh) -> None:
        self._root, self._mesh = root, mesh

    def digests(self) -> list[int]:
        """Returns a number per axis, the same on ranks whose tensors are alike along it. Reads all of them once, for
        which the host waits; no communication."""
        held, trained = self._held(), [one.requires_grad for one in self._root.parameters()]
        sums = digests([tensor for _, tensor in held], _sum_of_bits)
        return [hash((*trained, *(one for one, (_, held) in zip(sums, held) if _copies(held, axis))))
                for axis in range(self._mesh.ndim)]  # fmt: skip

    def check(self, when: str) -> None:
        """Raises PlainTensorError, on all ranks alike, if ranks hold other values of what is the same part of a tensor.

        Arguments:
            when: between which calls of the model that came to be.

        Cost: as of `digests`, and two small all-gathers per mesh axis.
        """
        held = dict(self._held())
        sums = dict(zip(held, digests(list(held.values()), _sum_of_bits)))
        flags = {f"requires_grad of {name!r}": +one.requires_grad for name, one in self._root.named_parameters()}
        sums |= flags
        kept = [flags | {name: sums[name] for name, one in held.items() if _copies(one, axis)}
                for axis in range(self._mesh.ndim)]  # fmt: skip
        found = _odd(kept, [*flags, *held], self._mesh)
        odd = fold_objects(found, lambda said: min(filter(None, said), default=None), self._mesh)
        if odd is None:
            return
        _, other, axis, first = odd
        here = place_of(self._mesh.coordinate, self._mesh)
        told = fold_objects({here: sums} if here in (first, other) else {}, _merged, self._mesh)  # all know the same
        apart = [name for name in kept[axis] if told[first][name] != told[other][name]]
        raise PlainTensorError(
            "model",
            f"{apart[0]} has different values on rank {other} of {self._mesh} than on rank {first}, which holds the "
            f"same part of it{when}: it was written on only some ranks, or with different values, or memory is broken",
            [f"tensors that differ  {len(apart)} of {len(kept[axis])}", *apart[1:4]],
            [
                ("write it on every rank, by the same values", "no `if rank == 0:` around what changes weights"),
                ("vescale.load(path, {'model': model})", "on every rank: weights of a checkpoint"),
            ],
        )

    def _held(self) -> list[tuple[str, DTensor]]:
        """Returns them in an order that all ranks share, each with what an error calls it."""
        named = sorted(self._states(), key=lambda named: named[0])  # first, for they part parameters, and not reversely
        named += [(f"the parameter {name!r}", one) for name, one in self._root.named_parameters()]
        named += [(f"the buffer {name!r}", one) for name, one in self._root.named_buffers()]
        sizes = self._mesh.sizes
        return [
            (name, one)
            for name, one in named
            if type(one) is DTensor
            and one._layout.mesh is self._mesh
            and not one.is_meta
            and any(size > 1 and _copies(one, axis) for axis, size in enumerate(sizes))
        ]

    def _states(self) -> Iterator[tuple[str, Any]]:
        held = getattr(self._root, "_vescale", None)
        for optimizer in () if held is None else [made() for made in held.sync.optimizers]:
            if optimizer is not None:
                yield from optimizer.named_states()


def _copies(tensor: DTensor, axis: int) -> bool:
    return tensor._layout.base.states[axis] in (INVARIANT, REPLICATE)


def _sum_of_bits(bits: Tensor) -> Tensor:
    """Adds all bits, taken as the widest integers that they are aligned for."""
    size = bits.element_size()
    wide = 8 // size
    if bits.storage_offset() * size % 8 or bits.numel() < wide:
        return bits.sum(dtype=torch.int64)
    whole = bits.numel() // wide * wide
    return bits[:whole].view(torch.int64).sum() + bits[whole:].sum(dtype=torch.int64)


def _odd(own: Sequence[dict[str, int]], names: Sequence[str], mesh: Mesh) -> tuple[int, int, int, int] | None:
    """Along one of this rank's lines: the place of the first tensor of which ranks hold other values; the first rank,
    by its place in the mesh, whose are other than those of most of the line; the axis; and the first of those."""
    found = []
    for axis, sums in enumerate(own):
        line = line_objects(sums, mesh, axis)
        for name in sums:
            values = [theirs[name] for theirs in line]
            ((most, count),) = Counter(values).most_common(1)
            if count < len(line):
                places = values.index(most), next(at for at, one in enumerate(values) if one != most)
                here = mesh.coordinate
                first, other = (place_of((*here[:axis], at, *here[axis + 1 :]), mesh) for at in places)
                found.append((names.index(name), other, axis, first))
                break
    return min(found, default=None)


def _merged(parts: list[dict]) -> dict:
    return {place: sums for part in parts for place, sums in part.items()}
