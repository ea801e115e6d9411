"""Plan: how one model is sharded over named mesh axes. A value: readable, comparable, nothing runs by making one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from vescale_dtensor import Placement, Replicate, VescaleError

Placements = Mapping[str, Placement]
"""Axis name -> placement. For a parameter an axis that is not named replicates; at a boundary it stays as it is."""


class PlanError(VescaleError):
    """A plan that does not fit its model, its mesh, or itself."""


@dataclass(frozen=True)
class Boundary:
    """Layouts at a module's border, converted explicitly when the module is called.

    Arguments:
        input: of the first tensor among the positional, then the keyword arguments.
        output: of the first tensor that the module returns.
        arguments: of further arguments, by parameter name.

    Cost: what `DTensor.redistribute` costs; nothing where the layout is right already.
    """

    input: Placements = field(default_factory=dict)
    output: Placements = field(default_factory=dict)
    arguments: Mapping[str, Placements] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The whole sharding of one model.

    Arguments:
        mesh: axis name -> size, outermost first; their product is the world size.
        parameters: pattern over parameter names -> placements. Patterns are globs
            ("*" also matches dots); the first that matches decides, in the order
            written. Every parameter must be decided: end with `"*": {}` to
            replicate the rest.
        boundaries: pattern over module names -> Boundary, first match decides.
        data_axis: the axis over which the batch (dim 0 of every tensor that enters
            the model) is sharded; None for no data parallelism.

    Example:
        >>> Plan(
        ...     mesh={"dp": 2, "tp": 2},
        ...     parameters={"*.up.weight": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}},
        ...     boundaries={"*.mlp": Boundary(input={"tp": Replicate()}, output={"tp": Shard(1)})},
        ... )

    Raises PlanError when it names an axis that its mesh does not have, or a size below 1.
    """

    mesh: Mapping[str, int]
    parameters: Mapping[str, Placements]
    boundaries: Mapping[str, Boundary] = field(default_factory=dict)
    data_axis: str | None = "dp"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", dict(self.mesh))
        if self.data_axis is not None and self.data_axis not in self.mesh:
            object.__setattr__(self, "data_axis", self._no_default_axis())
        for name, size in self.mesh.items():
            if not isinstance(size, int) or size < 1:
                raise PlanError("Plan", f"mesh axis {name!r} has size {size!r}, which is not a positive number")
        for where, placements in self._places():
            self._check_places(where, placements)

    @property
    def world_size(self) -> int:
        """Ranks that the plan needs."""
        return prod(self.mesh.values())

    def placements(self, named: Placements) -> tuple[Placement, ...]:
        """One placement per mesh axis; Replicate where none is named."""
        return tuple(named.get(axis, Replicate()) for axis in self.mesh)

    def local_batch(self, batch: Any) -> Any:
        """This rank's part of the batch as DTensors sharded over the data axis (dim 0); nothing is moved.

        Arguments: tensors, in any nesting of tuples, lists and dicts. Ranks that differ
        only along other axes must give the same part.

        The ranks exchange shapes (a small all-gather); parts may differ in size as
        torch.chunk's do. Raises ShapeError, on all ranks alike, when they do not fit.
        """
        from ._inputs import local_batch

        return local_batch(self, batch)

    def _no_default_axis(self) -> None:
        """The default "dp" may be absent; an axis that somebody wrote may not."""
        if self.data_axis != "dp":
            raise PlanError(
                "Plan",
                f"data_axis {self.data_axis!r} is not an axis of the mesh {self.mesh}",
                (),
                [(f"data_axis={next(iter(self.mesh), None)!r}", ""), ("data_axis=None", "no data parallelism")],
            )

    def _places(self):
        for pattern, placements in self.parameters.items():
            yield f"parameters[{pattern!r}]", placements
        for pattern, boundary in self.boundaries.items():
            yield f"boundaries[{pattern!r}].input", boundary.input
            yield f"boundaries[{pattern!r}].output", boundary.output
            for name, placements in boundary.arguments.items():
                yield f"boundaries[{pattern!r}].arguments[{name!r}]", placements

    def _check_places(self, where: str, placements: Placements) -> None:
        if not isinstance(placements, Mapping):
            raise PlanError(
                "Plan",
                f"{where} is {placements!r}, not a mapping from axis names to placements",
                [f"mesh  {self.mesh}"],
                [(f'{{"{next(iter(self.mesh), "tp")}": {placements!r}}}', "names the axis")],
            )
        for axis, placement in placements.items():
            if axis not in self.mesh:
                raise PlanError(
                    "Plan",
                    f"{where} names axis {axis!r}, which the mesh does not have",
                    [f"mesh  {self.mesh}"],
                    [(f"use one of {', '.join(map(repr, self.mesh))}", "")],
                )
            if not isinstance(placement, Placement):
                raise PlanError(
                    "Plan",
                    f"{where} places axis {axis!r} as {placement!r}, which is not a placement",
                    [f"mesh  {self.mesh}"],
                    [("use Shard(dim), Replicate(), InterleavedShard(dim, groups)", "")],
                )
