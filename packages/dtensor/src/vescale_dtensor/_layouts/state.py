"""The state of a tensor along one mesh axis, and of its gradient.

Users write placements; the engine keeps states, because a replicated value has
two kinds of gradient (design section 3):

    S(d)  sharded on dim d                               gradient S(d)
    P     partial sum                                    gradient R
    I     replicated; every rank does the same with it   gradient I
    R     replicated; ranks do different work with it    gradient P

A sharding carries how the dim is cut: into equal chunks, into `groups` groups
cut alike (InterleavedShard, in the ranks' order or another), or in the proportions of `units` (RaggedShard).
A fifth state, F, is a shard of what all other axes leave, flattened and cut into
parts of `units` elements (RaggedShard over all dims); its gradient is F.
States are interned: compare them with `is`.
"""

from __future__ import annotations

from math import gcd

from ..placement import InterleavedShard, Partial, Placement, RaggedShard, Replicate, Shard


class State:
    """One mesh axis of a layout. Make one with `sharded(...)`, `flat(...)`, or use `PARTIAL`, `INVARIANT`, `REPLICATE`.

    `dim` is the tensor dim that is cut; of a flat state, how many dims are flattened.
    """

    __slots__ = ("kind", "dim", "groups", "units", "order", "__weakref__")

    def __init__(
        self, kind: str, dim: int = -1, groups: int = 1, units: tuple[int, ...] | None = None,
        order: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.dim = dim
        self.groups = groups
        self.units = units
        self.order = order

    @property
    def is_sharded(self) -> bool:
        """True if it cuts a dim."""
        return self.kind == "S"

    @property
    def in_one_piece(self) -> bool:
        """True if every rank of a sharded axis holds one range of the dim, in the order of ranks."""
        return self.groups == 1 and self.order is None

    @property
    def is_replicated(self) -> bool:
        return self.kind == "I" or self.kind == "R"

    @property
    def gradient(self) -> State:
        """The state of the gradient of a tensor in this state."""
        return _GRADIENT[self.kind] or self

    @property
    def placement(self) -> Placement:
        """The public placement: I and R are both `Replicate()`."""
        if self.kind == "S":
            if self.units is not None:
                return RaggedShard((self.dim,), self.units)
            if self.in_one_piece:
                return Shard(self.dim)
            return InterleavedShard(self.dim, self.groups, self.order)
        if self.kind == "F":
            return RaggedShard(tuple(range(self.dim)), self.units)
        return Partial() if self.kind == "P" else Replicate()

    def at(self, dim: int) -> State:
        """The same cut, on another dim."""
        return sharded(dim, self.groups, self.units, self.order)

    def __repr__(self) -> str:
        if self.kind == "F":
            return f"F({':'.join(map(str, self.units))})"
        if self.kind != "S":
            return self.kind
        if self.units is not None:
            return f"S({self.dim}, units={':'.join(map(str, self.units))})"
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return f"S({self.dim}{groups}{f', order={self.order}' if self.order else ''})"

    def __reduce__(self):
        return (_restore, (self.kind, self.dim, self.groups, self.units, self.order))


PARTIAL = State("P")
INVARIANT = State("I")
REPLICATE = State("R")
_GRADIENT = {"S": None, "F": None, "P": REPLICATE, "I": INVARIANT, "R": PARTIAL}
_UNSHARDED = {"P": PARTIAL, "I": INVARIANT, "R": REPLICATE}


_sharded: dict[tuple, State] = {}


def sharded(
    dim: int, groups: int = 1, units: tuple[int, ...] | None = None, order: tuple[int, ...] | None = None
) -> State:
    """The interned sharded state of dim `dim`; `units` are reduced to lowest terms."""
    key = (dim, groups, units, order)
    state = _sharded.get(key)
    if state is None:
        divisor = gcd(*units) if units is not None else 1
        if divisor > 1:
            state = sharded(dim, groups, tuple(unit // divisor for unit in units))
        else:
            state = State("S", dim, groups, units, order)
        _sharded[key] = state
    return state


def state_of(placement: Shard | InterleavedShard) -> State:
    """The state that a cut of one dim means."""
    if isinstance(placement, InterleavedShard):
        return sharded(placement.dim, placement.groups, order=placement.order)
    return sharded(placement.dim)


_flat: dict[tuple, State] = {}


def flat(ndim: int, units: tuple[int, ...]) -> State:
    """The interned flat state of a tensor of `ndim` dims: parts of `units` elements of the flattened shard."""
    state = _flat.get((ndim, units))
    if state is None:
        state = _flat[ndim, units] = State("F", ndim, units=units)
    return state


def _restore(
    kind: str, dim: int, groups: int, units: tuple[int, ...] | None, order: tuple[int, ...] | None = None
) -> State:
    """Restores what `__reduce__` wrote; without an order if that was before chunks were dealt out."""
    if kind == "F":
        return flat(dim, units)
    return sharded(dim, groups, units, order) if kind == "S" else _UNSHARDED[kind]
