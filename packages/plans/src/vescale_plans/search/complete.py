"""The boundaries that a plan of parameters alone leaves open, found by probing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from vescale_dtensor import InterleavedShard, Placement, Replicate, Shard
from vescale_dtensor.engine import cut_ranges, unstopped

from .._apply.generators import generators_kept
from .._plan.fields import PlanFields
from .._plan.match import decided, first_match
from .._plan.parts import Boundary
from .probing.find_structure import structure_of
from .probing.sample import sample_of
from .structure import Group, Structure
from .tensor_plan import patterns

_Plan = TypeVar("_Plan", bound=PlanFields)
Cut = Shard | InterleavedShard


@generators_kept()
def completed(plan: _Plan, model: nn.Module, sample: Any) -> _Plan:
    """See `Plan.complete`."""
    with unstopped("Plan.complete runs the model on tensors without values"):
        structure = structure_of(model, sample_of(model, sample), priced=False)
    taken = {plan.expert_axis, plan.context_axis, plan.pipeline.axis if plan.pipeline else None, *plan.data_axes}
    leaving: dict[str, dict[str, Placement]] = {}
    for axis in plan.mesh:
        if axis not in taken and plan.mesh[axis] > 1:
            for name in _made_full(structure, _split(plan, structure, axis), plan.mesh[axis]):
                leaving.setdefault(name, {})[axis] = Replicate()
    added = {name: _beside(plan, name, output) for name, output in leaving.items()}
    globs = patterns({name: added.get(name) for name in structure.modules}, rest=None, last=False)
    if not globs:
        return plan
    merged = globs | {glob: said for glob, said in plan.boundaries.items() if glob not in globs}
    deciding = {first_match(merged, name) for name in structure.modules}
    return replace(plan, boundaries={glob: said for glob, said in merged.items() if glob in deciding})


def _split(plan: PlanFields, structure: Structure, axis: str) -> dict[str, Cut]:
    """Parameter -> how the plan cuts it along the axis."""
    placed = {name: decided(plan.parameters, name, {}).get(axis) for name in structure.shapes}
    return {name: one for name, one in placed.items() if isinstance(one, Shard | InterleavedShard)}


def _made_full(structure: Structure, split: Mapping[str, Cut], ranks: int) -> list[str]:
    """Modules whose output is to be made whole once, for all who read it: a sum of parts that a cut sink gives, what
    feeds a sink in other parts than it is cut in, and where the residual stream begins, that of a cut table."""
    cut = [group for group in structure.groups if group.sink in split and split[group.sink].dim == group.dim]
    astray = [name for group in cut for name in _astray(group, split, ranks)]
    tables = [one.module for one in structure.lookups if one.parameter in split]
    streams = tables and [*structure.stream_entries, *tables]
    return [name for name in dict.fromkeys([*(group.module for group in cut), *astray, *streams]) if name]


def _astray(group: Group, split: Mapping[str, Cut], ranks: int) -> Iterator[str]:
    """Modules that give a rank features which another rank's part of the sink reads, as those of a weight do that holds
    gate and up one after the other: each function that meets them would convert them for itself."""
    reading = cut_ranges(split[group.sink], group.features, ranks)
    for source in group.sources:
        module, placement = source.module, split.get(source.parameter)
        is_its_own = module is not None and source.parameter.rpartition(".")[0] == module
        if placement is None or placement.dim != source.dim or source.companion or group.experts or not is_its_own:
            continue
        unit = source.size // len(source.spans)
        given = cut_ranges(placement, source.size, ranks)
        reached = (
            any(first <= start and stop <= last for first, last in read)
            for held, read in zip(given, reading, strict=True)
            for begin, end in held
            for start, stop in source.spans[begin // unit : -(-end // unit)]
            if start < stop
        )
        if not group.sink.startswith(f"{module}.") and not all(reached):
            yield module


def _beside(plan: PlanFields, name: str, output: Mapping[str, Placement]) -> Boundary | None:
    """Returns the plan's boundary for the module, with `output` for the axes of which it says nothing; None adds
    nothing."""
    said = decided(plan.boundaries, name, Boundary())
    if all(axis in said.output for axis in output):
        return None
    return Boundary(said.input, {**output, **said.output}, said.arguments)
