"""Tensor and sequence parallelism of a structure, as the parameters and boundaries of a `Plan`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from vescale_dtensor import InterleavedShard, Placement, Replicate, Shard

from .._plan.match import decided
from .._plan.parts import Boundary, Placements, PlanError
from .structure import Group, Structure

T = TypeVar("T")


@dataclass(frozen=True)
class TensorPlan:
    """The part of a `Plan` for its tensor axis.

    Arguments:
        parameters, boundaries: as in `Plan`; every parameter is decided.
        split: names of the parameters that are split, with their placement.
    """

    parameters: Mapping[str, Placements]
    boundaries: Mapping[str, Boundary]
    split: Mapping[str, Placement]


def tensor_parallel_plan(
    structure: Structure, degree: int, *, sequence_parallel: bool = False, axis: str = "tp"
) -> TensorPlan:
    """Splits every group of `structure` that `degree` divides, the vocabulary, and nothing else.

    A group whose parts cannot be kept apart is split by its weights alone: what they give is gathered. Where there is
    no group, the vocabulary is all that is split.

    Arguments:
        degree: ranks along `axis`.
        sequence_parallel: between the groups, activations are split by position.

    Communication per group and direction: one all-reduce; with sequence parallelism one all-gather and one
    reduce-scatter. Of a gathered group one all-gather per source more.

    Raises PlanError when `degree` splits nothing of the structure, or when sequence parallelism is asked for
    and positions meet outside the groups.
    """
    split = split_parameters(structure, degree)
    if degree > 1 and degree not in structure.degrees and not any(group.sink in split for group in structure.groups):
        raise PlanError(
            "tensor_parallel_plan",
            f"no group of the model can be split {degree} ways",
            [
                f"{group.sink}  {group.atoms} atoms, splits by {list(group.degrees) or 'nothing'}"
                for group in structure.groups[:4]
            ],
            [(f"degree={one}", "splits every group") for one in structure.degrees[-1:]],
        )
    if sequence_parallel and structure.position_dim is None:
        raise PlanError(
            "tensor_parallel_plan",
            "sequence_parallel needs positions that interact only inside the groups, and this model's do not",
            (),
            [("sequence_parallel=False", "activations between the groups are replicated")],
        )
    return TensorPlan(
        patterns({name: {axis: split[name]} if name in split else {} for name in structure.shapes}, rest={}),
        _boundaries(structure, split, degree, axis, structure.position_dim if sequence_parallel else None),
        split,
    )


def split_parameters(structure: Structure, degree: int) -> dict[str, Placement]:
    """Parameter -> how `degree` ranks split it; what stays whole is not named."""
    split: dict[str, Placement] = {}
    if degree < 2:
        return split
    for group in structure.groups:
        placed = group.split(degree) or {n: (one, Shard(one.dim)) for n, one in group.gathered(degree).items()}
        if not placed:
            continue
        split[group.sink] = Shard(group.dim)
        for source, placement in placed.values():
            split[source.parameter] = placement
            if source.bias is not None:
                flat = len(structure.shapes[source.bias]) == 1
                split[source.bias] = _on(placement, 0 if flat else source.dim)
    for one in (*structure.lookups, *structure.heads):
        if structure.shapes[one.parameter][one.dim] < degree or one.parameter in split:
            continue
        split[one.parameter] = Shard(one.dim)
        if one.bias is not None:
            split[one.bias] = Shard(0)
    for names in structure.tied:
        known = [split[name] for name in names if name in split]
        if known:
            split.update(dict.fromkeys(names, known[0]))
    return split


def _on(placement: Placement, dim: int) -> Placement:
    """The same cut of another dim."""
    if isinstance(placement, InterleavedShard):
        return InterleavedShard(dim, placement.groups, placement.order)
    return Shard(dim)


def _boundaries(
    structure: Structure, split: Mapping[str, Placement], degree: int, axis: str, position: int | None
) -> dict[str, Boundary]:
    whole = {axis: Replicate()}
    stream = whole if position is None else {axis: Shard(position)}
    entering: dict[str, Placements] = {}
    leaving: dict[str, Placements] = {}
    for group in structure.groups:
        if group.sink not in split:
            continue
        leaving.update({source.module: whole for source in group.gathered(degree).values()})
        if group.module and not _is_added_to(group, structure, split):
            leaving[group.module] = stream
        if position is not None:
            entering.update({source.module: whole for source in group.sources if source.module})
    if position is not None:
        leaving.update({name: stream for name in structure.stream_entries if name and name not in leaving})
        entering.update({one.module: whole for one in structure.heads if one.module})
    else:  # a split table gives partial sums, which would be added up wherever they are met
        tables = {one.module for one in structure.lookups if one.parameter in split}
        leaving.update({name: whole for name in (*structure.stream_entries, *tables) if name and name not in leaving})
    named = {name: Boundary(entering.get(name, {}), leaving.get(name, {})) for name in {**entering, **leaving}}
    return patterns({name: named.get(name) for name in structure.modules}, rest=None, last=False)


def _is_added_to(group: Group, structure: Structure, split: Mapping[str, Placement]) -> bool:
    """True if the group's output, the sum of a shared expert, is added to that of experts around it, which a boundary
    makes whole together: both as wide, and the one module in the other."""

    def width(one: Group) -> int:
        return [size for dim, size in enumerate(structure.shapes[one.sink]) if dim != one.dim][-1]

    return any(
        other.experts and other.sink in split and other.module
        and f"{group.module}.".startswith(f"{other.module}.") and group.module != other.module
        and width(group) == width(other)
        for other in structure.groups
    )  # fmt: skip


def patterns(named: Mapping[str, T], *, rest: T, last: bool = True) -> dict[str, T]:
    """Globs that give exactly these names these values; numbers in a name become "*" where all such names agree.

    Names with the value `rest` are named by none; with `last` they are left to a "*" at the end.
    """
    families: dict[str, list[str]] = {}
    for name in named:
        families.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    patterns: dict[str, T] = {}
    for family, names in families.items():
        values = [named[name] for name in names]
        if all(value == values[0] for value in values):
            patterns[family] = values[0]
        else:
            patterns.update({name: named[name] for name in names})
    patterns = {pattern: value for pattern, value in patterns.items() if value != rest}
    if any(decided(patterns, name, rest) != value for name, value in named.items()):
        patterns = {name: value for name, value in named.items() if value != rest}  # a star took more than numbers
    return patterns | {"*": rest} if last else patterns
