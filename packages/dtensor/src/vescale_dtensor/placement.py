"""Placements: how a tensor lies along one mesh axis, as users write it.

`Shard`, `Replicate` and `Partial` are torch's own classes, so that a layout
written for torch's DTensor reads the same here. Two are ours:

- `InterleavedShard(dim, groups)`: the dim is `groups` equal groups one after the
  other (a merged QKV is 3, a merged gate-up 2), and every group is sharded alike;
  an `order` says whose each of its chunks is (`zigzag`: a front and a back one).
- `RaggedShard(dims, local_units)`: contiguous parts of unequal size, zero allowed:
  of one dim, in the proportions of `local_units`, or of the whole shard, flattened.

Uneven sizes follow `torch.chunk` wherever nothing else is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import Partial as Partial
from torch.distributed.tensor import Replicate as Replicate
from torch.distributed.tensor import Shard as Shard
from torch.distributed.tensor.placement_types import Placement as Placement

from vescale_trace.text import shown

from ._errors import MeshError, PlacementError

if TYPE_CHECKING:
    Placements = Placement | Sequence[Placement]
else:
    Placements = Any  # as users write them: `as_tuple` and whoever reads them say which one is wrong


def as_tuple(operation: str, placements: Placements) -> tuple[Placement, ...]:
    """Returns the placements of a call; one stands for itself. Raises PlacementError for what is none."""
    if isinstance(placements, Placement):
        return (placements,)
    try:
        return tuple(placements)
    except TypeError:
        rule = f"placements are {shown(placements)}: one placement per axis of the mesh is needed"
        raise PlacementError(operation, rule, (), [("[Shard(0)]", ""), ("[Replicate()]", "")]) from None


class InterleavedShard(Placement):
    """Shards `dim`, which consists of `groups` equal groups, so that every rank holds its part of each group.

    The local tensor is the concatenation, along `dim`, of this rank's chunk of group 0, of group 1, and so on.

    With `order`, a group is split into as many chunks as `order` has entries, with the sizes of `torch.chunk`, and
    chunk i belongs to rank `order[i]`. `zigzag(n)` gives each of n ranks a front and a back chunk. If the work grows
    along the dim, as under a causal mask, this balances it.

    >>> InterleavedShard(0, 3)
    InterleavedShard(dim=0, groups=3)
    >>> InterleavedShard(1, 1, zigzag(2))
    InterleavedShard(dim=1, groups=1, order=(0, 1, 1, 0))
    """

    def __init__(self, dim: int, groups: int, order: Sequence[int] | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.groups = groups
        self.order = None if order is None else tuple(order)

    def _key(self) -> tuple:
        return self.dim, self.groups, self.order

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InterleavedShard) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((InterleavedShard, self._key()))

    def __repr__(self) -> str:
        order = "" if self.order is None else f", order={self.order}"
        return f"InterleavedShard(dim={self.dim}, groups={self.groups}{order})"

    def __reduce__(self):
        return (InterleavedShard, self._key())


def zigzag(ranks: int) -> tuple[int, ...]:
    """Returns the chunk order in which rank r of n holds chunks r and 2n - 1 - r.

    >>> zigzag(3)
    (0, 1, 2, 2, 1, 0)
    """
    if not 0 < ranks <= 1 << 24:
        raise MeshError("zigzag", f"{ranks} is no number of ranks", (), [("zigzag(8)", "")])
    return (*range(ranks), *reversed(range(ranks)))


class RaggedShard(Placement):
    """Shards contiguously, into parts of unequal size, with one entry of `local_units` per rank of the axis.

    One dim: `dims=(d,)`, split in the proportions of `local_units`.

    All dims: `dims=(0, ..., n-1)` of a tensor of n dims. The shard that the other axes leave is flattened row-major and
    split into parts of `local_units` elements, so the local tensor is 1-D. This split comes last, whatever the axis's
    position in the mesh. The units sum to the elements of the largest shard; if the other axes leave a smaller one, the
    last parts end early. (A dim of a 1-D tensor that no other axis shards is both.)

    >>> RaggedShard((0,), (3, 2))
    RaggedShard(dims=(0,), local_units=(3, 2))
    >>> RaggedShard((0, 1), (5, 0, 7))
    RaggedShard(dims=(0, 1), local_units=(5, 0, 7))
    """

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        super().__init__()
        self.dims = tuple(dims)
        self.local_units = tuple(local_units)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and (self.dims, self.local_units) == (other.dims, other.local_units)

    def __hash__(self) -> int:
        return hash((RaggedShard, self.dims, self.local_units))

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"

    def __reduce__(self):
        return (RaggedShard, (self.dims, self.local_units))
