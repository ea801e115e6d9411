"""Units: a model's blocks with their buckets, and which parameters share one.

An `FSDPUnit` is one block of the model, or below ZeRO-3 several, gathered and reduced together; the root, with what
lies in no block, is the last. When they are gathered and reduced is `zero.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from math import prod

from torch import nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import PARTIAL

from .._apply.blocks import blocks_of, owners
from .bucket import Bucket
from .sharded_parameter import Sharing, holders

# Below ZeRO-3 blocks share buckets of a quarter of the model, within these bounds: fewer collectives than one per
# block, and still some that start while backward runs.
BUCKET_BYTES, LEAST_BUCKET_BYTES, BUCKETS = 25 << 20, 1 << 20, 4
# Parameters of a block that are partial over other axes than most go to the root when they are this few, relatively:
# one collective for all norms of a model instead of one per block.
_FEW = 1 / 16


Key = Callable[[str, DTensor], tuple]
"""A parameter -> the properties that those of one bucket share, the last of them the `Sharing`."""


class Pass:
    """One call of a block in a forward pass: open in backward from the first gradient of its outputs on, until those
    of all its inputs are there. (A block that is called twice has two.) `left`: of `inputs`, in the backward that
    runs: there may be several. `began`: the number of the first node that it may make."""

    __slots__ = ("inputs", "left", "began")

    def __init__(self, began: int | None = None) -> None:
        self.inputs = self.left = 0
        self.began = began


class FSDPUnit:
    """Blocks that are gathered and reduced together."""

    def __init__(self, name: str, modules: list[nn.Module], buckets: list[Bucket], uneven: bool = False) -> None:
        """`uneven`: a backward reaches some of its parameters on some ranks only, so that it is complete on each rank
        at another place among the collectives of that backward."""
        self.name, self.modules, self.buckets, self.uneven = name, modules, buckets, uneven
        self.unsharded = [bucket for bucket in buckets if bucket.separate]
        self.look_at_buckets()
        self.is_open = not self.unsharded
        self.next: dict[bool, FSDPUnit | None] = {False: None, True: None}  # by whether this is a backward
        self.touched = False
        self.reentered = False  # a checkpoint inside a block brought gradients in a backward of its own, and may again
        self.entered: list[Pass] = []  # calls that have not returned
        self.passes: set[Pass] = set()  # in backward, those that a gradient has reached
        self.to_recompute = 0  # calls in reentrant checkpoints, each of which adds to the gradients anew

    def look_at_buckets(self) -> None:
        self.reduced = [bucket for bucket in self.buckets if bucket.reduces]
        # Autograd may keep gradients that nobody sums yet, as it does on one device: they come in the sum's dtype.
        self.may_wait = not self.unsharded and all(bucket.reduce is bucket.dtype for bucket in self.reduced)

    @property
    def nbytes(self) -> int:
        """Bytes that are gathered for it."""
        return sum(bucket.packing.total * bucket.compute.itemsize for bucket in self.unsharded)

    def start_unshard(self) -> None:
        for bucket in self.unsharded:
            bucket.start_unshard()

    def unshard(self) -> None:
        """The block computes with full parameters from here on."""
        if self.is_open:
            return
        self.start_unshard()
        for bucket in self.unsharded:
            bucket.begin_unsharded()
        self.is_open = True

    def hide(self) -> None:
        """Outside of the model's calls parameters are the full-precision shards, so that a write to one stays; what was
        gathered is kept for the backward that comes."""
        for bucket in self.unsharded:
            bucket.end_unsharded()
        self.is_open = not self.unsharded

    def reshard(self) -> None:
        if self.is_open or any(bucket.ready or bucket.gathering is not None for bucket in self.unsharded):
            for bucket in self.unsharded:
                bucket.reshard()
        self.is_open = not self.unsharded

    def open_gradients(self) -> None:
        self.touched = True
        for bucket in self.reduced:
            bucket.open_gradients()

    @property
    def is_intact(self) -> bool:
        return all(bucket.is_intact for bucket in self.buckets)

    def complete(self, one_by_one: bool) -> list[Bucket]:
        """The buckets all of whose gradients are there; none before all are, where one may get more, or where they are
        not to start `one_by_one`."""
        full = [bucket for bucket in self.reduced if bucket.is_full or bucket.started]
        waits = self.reentered or bool(self.unsharded) or not one_by_one
        return [] if waits and len(full) < len(self.reduced) else full


def units_of(
    model: nn.Module,
    sharing: Sharing,
    rows: Mapping[str, int],
    closed: Collection[nn.Module] = (),
    own: Mapping[str, Sharing] | None = None,
) -> list[FSDPUnit]:
    """The units of a model in its order, the root's last. `rows`: by parameter name, see `Plan.blocks`; `closed`: lists
    whose members are no blocks; `own`: by parameter name, where it is not `sharing`."""

    def key(name: str, parameter: DTensor) -> tuple:
        return *_key(parameter), (own or {}).get(name, sharing)

    blocks = blocks_of(model, closed)
    owner = owners(model, blocks)
    named: dict[int, list[tuple[str, DTensor]]] = {}
    for name, parameter in model.named_parameters():
        if type(parameter) is DTensor and "_owner" not in parameter.__dict__:  # else of a parallelized model inside
            named.setdefault(owner[id(parameter)], []).append((name, parameter))
    groups: list[tuple[list[str], list[nn.Module], list[tuple[str, DTensor]]]] = []
    root = list(named.get(-1, ()))
    apart = any(one.zero >= 3 or one.precision is not None for one in (sharing, *(own or {}).values()))
    every = [one for members in named.values() for one in members]
    limit = min(max(_bytes(every) // BUCKETS, LEAST_BUCKET_BYTES), BUCKET_BYTES)
    for index, (name, module) in enumerate(blocks):
        mine, few = _without_few(named.get(index, []), key)
        root += few
        if groups and not apart and _bytes(groups[-1][2]) + _bytes(mine) <= limit:
            names, modules, members = groups[-1]
            groups[-1] = ([*names, name], [*modules, module], members + mine)
        elif mine:
            groups.append(([name], [module], mine))
    rooted = [model]
    if groups and not apart and _bytes(groups[0][2]) + _bytes(root) <= limit:
        _, modules, members = groups.pop(0)  # the last that backward reaches, as the root's are
        rooted, root = [model, *modules], root + members
    dealt = {id(parameter) for each in closed for parameter in each.parameters()}

    def unit(names: list[str], modules: list[nn.Module], members: list[tuple[str, DTensor]]) -> FSDPUnit:
        uneven = any(id(parameter) in dealt for _, parameter in members)
        return FSDPUnit(", ".join(names), modules, _buckets(members, rows, key), uneven)

    root, head = (root, []) if apart or not blocks else _head_apart(model, root, blocks[-1][0])
    heads = [unit([""], [], head)] if head else []
    return [*(unit(*group) for group in groups), *heads, unit([""], rooted, root)]


def _head_apart(
    model: nn.Module, root: list[tuple[str, DTensor]], last: str
) -> tuple[list[tuple[str, DTensor]], list[tuple[str, DTensor]]]:
    """The root's parameters, and apart from them those registered after the `last` block, where both are large: a
    backward begins with these, and ends with the others."""
    names = [name for name, _ in model.named_parameters()]
    end = max((i for i, name in enumerate(names) if name.startswith(f"{last}.")), default=len(names))
    late = set(names[end + 1 :])
    head, rest = [one for one in root if one[0] in late], [one for one in root if one[0] not in late]
    return (rest, head) if min(_bytes(head), _bytes(rest)) >= LEAST_BUCKET_BYTES else (root, [])


def _without_few(named: list[tuple[str, DTensor]], key: Key) -> tuple[list, list]:
    """A block's parameters, and those few that are partial over other axes than most of it."""
    sizes: Counter[tuple] = Counter()
    for one in named:
        sizes[key(*one)] += one[1].numel()
    most = max(sizes, key=sizes.__getitem__, default=None)
    few = {each for each, size in sizes.items() if each != most and size < _FEW * sizes[most]}
    return [one for one in named if key(*one) not in few], [one for one in named if key(*one) in few]


def _key(parameter: DTensor) -> tuple:
    """Returns the properties that parameters of one bucket share: the axes over which their gradients are partial, and
    more."""
    layout = parameter.mesh_layout
    states = layout.gradient.states
    axes = tuple(a for a, state in enumerate(states) if state is PARTIAL and layout.mesh.sizes[a] > 1)
    return axes, parameter.dtype, parameter.device, parameter.requires_grad, holders(layout)


def _buckets(named: list[tuple[str, DTensor]], rows: Mapping[str, int], key: Key) -> list[Bucket]:
    """The parameters by what they have in common, cut where a bucket would outgrow its size below ZeRO-3.

    A backward comes to them in reverse, but for vectors: of a block's norms the first is used first, whatever place it
    is registered at. They go to the first bucket, and the others are complete without them.
    """
    keys = {name: key(name, parameter) for name, parameter in named}
    if all(each[-1].zero < 3 for each in keys.values()) and _bytes(named) > BUCKET_BYTES:
        named = sorted(named, key=lambda one: one[1].ndim > 1)
    groups: list[tuple[tuple, list]] = []
    for name, parameter in named:
        of = keys[name]
        mine = next((group for k, group in reversed(groups) if k == of), None)
        if mine is None or (of[-1].zero < 3 and _bytes(mine) + _bytes([(name, parameter)]) > BUCKET_BYTES):
            groups.append((of, mine := []))
        mine.append((name, parameter))
    return [Bucket(group, of[0], of[-1], [rows.get(name, 0) for name, _ in group]) for of, group in groups]


def _bytes(named: list[tuple[str, DTensor]]) -> int:
    """Bytes of a rank's shards on average: ranks must cut alike, though they may hold different amounts."""
    total = 0
    for _, parameter in named:
        layout = parameter.mesh_layout
        cut = prod(size for size, state in zip(layout.mesh.sizes, layout.states) if state.is_sharded)
        total += -(-layout.numel // cut) * parameter.itemsize
    return total
