"""Cuts this rank's rows from a global batch, and makes DTensors of what they were collated to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from vescale_dtensor.engine import canonical_states, first_apart, layout_of, mesh_of
from vescale_trace.text import shown
from vescale_trace.values import leaves, tensors_in

from .._apply.join import join, make_mesh
from .._plan.parts import PlanError
from ..plan import Plan

_BY_ROW = {
    (default_collate.__module__, default_collate.__qualname__),
    ("transformers.data.data_collator", "default_data_collator"),
    ("transformers.data.data_collator", "DefaultDataCollator"),
    ("transformers.data.data_collator", "torch_default_data_collator"),
}
"""Collate functions that stack samples and look at nothing else: parts of a batch are the batch of the parts."""


def is_by_row(collate: Any) -> bool:
    """True if a collate function is known to make of a part of the samples that part of the batch."""
    while (inner := getattr(collate, "data_collator", None)) is not None:  # transformers' wrapper, which drops columns
        collate = inner
    kind = collate if hasattr(collate, "__qualname__") else type(collate)
    return (getattr(kind, "__module__", None), getattr(kind, "__qualname__", None)) in _BY_ROW


class Cut:
    """The rows of batches over a plan's data axes, as torch.chunk cuts them."""

    def __init__(self, plan: Plan) -> None:
        join()
        self.plan = plan
        self.mesh = mesh_of(make_mesh(plan))
        self.is_whole = all(self.mesh.sizes[self.mesh.axis(name)] == 1 for name in plan.data_axes)

    def rows(self, count: int) -> tuple[int, int] | None:
        """(start, stop) of this rank's rows; None if some rank would have none."""
        states = canonical_states("vescale.loader", self.plan.batch_placements, self.mesh, (count,))
        layout = layout_of(self.mesh, states, (count,))
        last = tuple(size - 1 for size in self.mesh.sizes)
        if not count or not layout.shape_at(last)[0]:
            return None
        start, stop = layout.region_at(self.mesh.coordinate)[0][0]
        return start, stop

    def check_alike(self, value: Any, what: str, remedies: Sequence[tuple[str, str]]) -> None:
        """Raises PlanError, on all ranks alike, when ranks hold other values. Cost: a small all-gather."""
        apart = first_apart(value, self.mesh)
        if apart is not None:
            said = [f"rank {rank}  {shown(one)}" for rank, one in ((0, apart.first), (apart.rank, apart.value))]
            raise PlanError("vescale.loader", f"ranks 0 and {apart.rank} of {self.mesh} {what}", said, remedies)

    def joined(self, batch: Any) -> Any:
        """The batch of which every rank has collated its rows, as DTensors. Cost: a small all-gather of shapes."""
        tensors = tensors_in(batch)
        if not tensors or not all(isinstance(one, Tensor) for one in leaves(batch)):
            raise PlanError(
                "vescale.loader",
                "a batch holds something that is not a tensor, and its other rows are on other ranks",
                (),
                [("vescale.loader(loader, plan, parts=False)", "every rank loads whole batches")],
            )
        apart = first_apart(tuple(tuple(one.shape[1:]) for one in tensors), self.mesh)
        if apart is not None:
            at = next((i for i, (a, b) in enumerate(zip(apart.first, apart.value)) if a != b), 0)
            told = [(rank, said) for rank, said in ((0, apart.first), (apart.rank, apart.value)) if at < len(said)]
            raise PlanError(
                "vescale.loader",
                f"rows of one batch have other shapes on ranks 0 and {apart.rank} of {self.mesh}: on one device the "
                "collate function would see all of them",
                [f"rank {rank}  tensor {at}: {list(said[at])} per row" for rank, said in told],
                [
                    ("vescale.loader(loader, plan, parts=False)", "every rank collates whole batches"),
                    ("pad all samples to one length", ""),
                ],
            )
        return self.plan.local_batch(batch)


Collate = Callable[[list], Any]
