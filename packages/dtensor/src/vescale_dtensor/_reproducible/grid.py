"""The canonical grid: into how many blocks a dim is cut, and which of them a rank holds. Pure.

A dim of `extent` indices has `count` blocks of equal size, numbered along the global dim. How many follows from
the extent and the splits alone, never from the mesh, so that a block has the same shape everywhere. A mesh fits
when every shard is made of whole blocks; else it is an error that names the splits that would do.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .._errors import VescaleError
from .._layouts.layout import Layout
from .._layouts.mesh import Mesh

# Blocks of a dim that is only summed, element by element: finer blocks cost nothing there, and fit more meshes.
FINEST = 64


class ReproducibleError(VescaleError):
    """The computation has no order of sums that is independent of the mesh; the message says what to use instead."""


@dataclass(frozen=True)
class Splits:
    """Into how many blocks contractions cut their dims, powers of two; dims that do not divide have fewer.

    batch: the first dim of activations. seq: their second. hidden: features, of activations and of weights.
    """

    batch: int = 8
    seq: int = 2
    hidden: int = 8

    @staticmethod
    def of(given: Mapping[str, int] | Splits | None) -> Splits:
        """Loose user input made strict. Raises ReproducibleError for an unknown name, or no power of two."""
        if isinstance(given, Splits):
            return given
        given = dict(given or {})
        names = ("batch", "seq", "hidden")
        wrong = [name for name in given if name not in names]
        if wrong:
            remedies = [('splits={"batch": 8, "seq": 2, "hidden": 8}', "these are the names")]
            raise ReproducibleError("reproducible", f"unknown splits {', '.join(map(repr, wrong))}", (), remedies)
        for name, value in given.items():
            if not isinstance(value, int) or value < 1 or value & (value - 1):
                near = 1 << max(int(value) - 1, 0).bit_length() if isinstance(value, int) else 8
                rule = (
                    f"{name!r} is split into {value!r} blocks, which is not a power of two: blocks are summed in pairs"
                )
                fix = (f'splits={{"{name}": {near}}}', "the next power of two")
                raise ReproducibleError("reproducible", rule, (), [fix])
        return Splits(**given)


def block_count(extent: int, split: int) -> int:
    """Blocks of a dim: `split`, or the largest power of two below it that divides the dim."""
    return min(split, extent & -extent) if extent else 1


def fine_count(extent: int) -> int:
    """Blocks of a dim that is summed element by element; a factor of 3 lets merged query, key and value be sharded."""
    count = block_count(extent, FINEST)
    return 3 * count if extent and extent % (3 * count) == 0 else count


@dataclass(frozen=True, eq=False)
class Cut:
    """One dim of a local tensor, in blocks.

    count: blocks of the global dim. size: indices per block. held: the global numbers of the blocks that lie here,
    in local order. axes: the mesh axes that shard the dim. everyone: what each rank of `axes` holds, in rank order.
    """

    count: int
    size: int
    held: tuple[int, ...]
    mesh: Mesh | None = None
    axes: tuple[int, ...] = ()
    everyone: tuple[tuple[int, ...], ...] = ()

    @property
    def local(self) -> tuple[int, int]:
        """The local dim as (blocks, indices per block)."""
        return len(self.held), self.size

    @cached_property
    def levels(self) -> tuple[int, int, tuple[int, ...]]:
        """(levels of the tree that every rank can sum by itself, nodes left in all, their order when gathered)."""
        count, lists, levels = self.count, self.everyone or (self.held,), 0
        while count > 1 and count % 2 == 0 and all(_paired(numbers) for numbers in lists):
            lists = tuple(tuple(n // 2 for n in numbers[::2]) for numbers in lists)
            count, levels = count // 2, levels + 1
        flat = [number for numbers in lists for number in numbers]
        return levels, count, tuple(flat.index(number) for number in range(count)) if self.axes else ()


def _paired(numbers: tuple[int, ...]) -> bool:
    return len(numbers) % 2 == 0 and all(a % 2 == 0 and b == a + 1 for a, b in zip(numbers[::2], numbers[1::2]))


@lru_cache(maxsize=65536)
def cut_of(operation: str, layout: Layout, dim: int, count: int, split: str) -> Cut:
    """Dim `dim` of a tensor of `layout`, in `count` blocks. `split` names what the user would change.

    Raises ReproducibleError when a shard is not made of whole blocks.
    """
    extent, mesh = layout.shape[dim], layout.mesh
    size = extent // count if count else 0
    axes = tuple(axis for axis in layout.axes_of(dim) if mesh.sizes[axis] > 1)
    if not axes:
        return Cut(count, size, tuple(range(count)))
    everyone = []
    for place in itertools.product(*[range(mesh.sizes[axis]) for axis in axes]):
        coordinate = list(mesh.coordinate)
        for axis, at in zip(axes, place):
            coordinate[axis] = at
        ranges = layout.region_at(tuple(coordinate))[dim]
        if any(start % size or stop % size for start, stop in ranges) or not ranges:
            _raise_mesh(operation, layout, dim, count, split, axes)
        everyone.append(tuple(n for start, stop in ranges for n in range(start // size, stop // size)))
        if coordinate == list(mesh.coordinate):
            held = everyone[-1]
    if len({len(numbers) for numbers in everyone}) != 1:
        _raise_mesh(operation, layout, dim, count, split, axes)
    return Cut(count, size, held, mesh, axes, tuple(everyone))


def _raise_mesh(operation: str, layout: Layout, dim: int, count: int, split: str, axes: tuple[int, ...]) -> None:
    mesh, extent = layout.mesh, layout.shape[dim]
    ranks, state = mesh.count(axes), next(layout.states[axis] for axis in axes)
    wanted = ranks * state.groups
    near = 1 << (wanted - 1).bit_length()
    names = ", ".join(f"{mesh.names[axis]}={mesh.sizes[axis]}" for axis in axes)
    remedies = []
    if extent % near == 0 and near > count:
        remedies.append((f'reproducible(splits={{"{split}": {near}}})', "the nearest splits that this mesh divides"))
    below = max((n for n in range(1, ranks + 1) if count % n == 0), default=1)
    remedies.append((f"an axis of {below} ranks there", f"the nearest that divides {count} blocks"))
    raise ReproducibleError(
        operation,
        f"dim {dim} of size {extent} has {count} blocks, of which ({names}) does not give every rank whole ones",
        [f"operand  {layout!r}"],
        remedies,
    )
