"""Plan: how one model is sharded over named mesh axes. A value: readable, comparable, nothing runs by making one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from vescale_dtensor import Placement, Replicate, Shard

from ._parts import Boundary as Boundary
from ._parts import Pipeline as Pipeline
from ._parts import Placements as Placements
from ._parts import PlanError as PlanError
from ._parts import Precision as Precision
from ._self_check import check_itself


@dataclass(frozen=True)
class Plan:
    """The whole sharding of one model.

    Globs: "*" also matches dots. In every mapping from globs the first that matches a
    name decides, in the order written: write exceptions before the rule.

    Arguments:
        mesh: axis name -> size, outermost first; their product is the world size.
        parameters: glob over parameter names -> placements. Every parameter must be
            decided: end with `"*": {}` to replicate the rest.
        boundaries: glob over module names -> Boundary.
        data_axis: the axis over which the batch (dim 0 of every tensor that enters
            the model) is sharded, or several, outermost first; None for no data
            parallelism. Of several, ZeRO shards over the last, and replicates over
            the others (hybrid sharding).
        zero: 1 shards optimizer states over the data axis, 2 gradients too, 3 parameters too.
        pipeline: the stages, see `Pipeline`.
        checkpointing: glob over module names -> whether the activations inside are
            computed again in backward.
        regather: glob over module names -> whether what a conversion inside gathered
            for a whole activation is gathered again in backward, not kept.
        precision: see `Precision`; None computes in the parameters' dtype.
        offload: optimizer states live in host memory.
        blocks: glob over parameter names -> rows (dim 0) that ZeRO must not split.
        expert_axis: the axis over which experts are spread.

    Example:
        >>> Plan(
        ...     mesh={"dp": 2, "tp": 2},
        ...     parameters={"*.up.weight": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}},
        ...     boundaries={"*.mlp": Boundary(input={"tp": Replicate()}, output={"tp": Shard(1)})},
        ... )

    Raises PlanError when it names an axis that its mesh does not have, or a value is
    not of the kind above; nothing is known of a model yet.
    """

    mesh: Mapping[str, int]
    parameters: Mapping[str, Placements]
    boundaries: Mapping[str, Boundary] = field(default_factory=dict)
    data_axis: str | tuple[str, ...] | None = "dp"
    zero: int = 0
    pipeline: Pipeline | None = None
    checkpointing: Mapping[str, bool] = field(default_factory=dict)
    regather: Mapping[str, bool] = field(default_factory=dict)
    precision: Precision | None = None
    offload: bool = False
    blocks: Mapping[str, int] = field(default_factory=dict)
    expert_axis: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", dict(self.mesh))
        axes = (self.data_axis,) if isinstance(self.data_axis, str) else tuple(self.data_axis or ())
        if self.data_axis == "dp" and "dp" not in self.mesh:
            axes = ()  # the default may be absent; an axis that somebody wrote may not
        object.__setattr__(self, "data_axis", axes if len(axes) > 1 else next(iter(axes), None))
        check_itself(self)

    @property
    def world_size(self) -> int:
        """Ranks that the plan needs."""
        return prod(self.mesh.values())

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which the batch is sharded, outermost first; ZeRO shards over the last."""
        if self.data_axis is None:
            return ()
        return (self.data_axis,) if isinstance(self.data_axis, str) else self.data_axis

    def placements(self, named: Placements) -> tuple[Placement, ...]:
        """One placement per mesh axis; Replicate where none is named."""
        return tuple(named.get(axis, Replicate()) for axis in self.mesh)

    @property
    def batch_placements(self) -> tuple[Placement, ...]:
        """Of the tensors that enter the model: dim 0 is sharded over the data axes."""
        return self.placements({axis: Shard(0) for axis in self.data_axes})

    def local_batch(self, batch: Any) -> Any:
        """This rank's part of the batch as DTensors sharded over the data axes (dim 0); nothing is moved.

        Arguments: tensors, in any nesting of tuples, lists and dicts. Ranks that differ
        only along other axes must give the same part.

        The ranks exchange shapes (a small all-gather); parts may differ in size as
        torch.chunk's do. Raises ShapeError, on all ranks alike, when they do not fit.
        """
        from ._inputs import local_batch

        return local_batch(self, batch)
