"""The data of a plan: the fields of `Plan`, and what follows from them alone.

Whoever reads a plan takes this; `Plan` (`plan.py`) stands above all that its methods call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from vescale_dtensor import Placement, Replicate, Shard

from .parts import Boundary, Pipeline, Placements, Policy, Precision

EXPERT_FORMS = {
    "indices": "forward takes tokens [T, hidden], and the indices and weights [T, k] of the experts of each",
    "counts": "forward takes rows [N, hidden], sorted by expert, and how many rows each expert has",
}
"""How the forward of an experts module is told the expert of a row."""


@dataclass(frozen=True, eq=False)
class PlanFields:
    """See `Plan`, which says what each field means, and checks them."""

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
    capacity_factor: float | None = None
    accumulation: int = 1
    prefetch: int = 1
    ahead_bytes: int | None = None
    context_axis: str | None = None
    context: str = "auto"
    context_layout: str = "auto"
    offload_activations: Mapping[str, bool] = field(default_factory=dict)
    sums: str = "ordered"
    experts: Mapping[str, str] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)

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

    @property
    def zero_axis(self) -> str | None:
        """The axis over which ZeRO shards: the innermost data axis; without any the context axis, whose ranks have the
        same parameters too."""
        return self.data_axes[-1] if self.data_axes else self.context_axis

    def placements(self, named: Placements) -> tuple[Placement, ...]:
        """One placement per mesh axis; Replicate where none is named."""
        return tuple(named.get(axis, Replicate()) for axis in self.mesh)

    @property
    def batch_placements(self) -> tuple[Placement, ...]:
        """Placements of the tensors that enter the model: dim 0 is sharded over the data axes (for their sequences see
        `context_axis`)."""
        return self.placements({axis: Shard(0) for axis in self.data_axes})
