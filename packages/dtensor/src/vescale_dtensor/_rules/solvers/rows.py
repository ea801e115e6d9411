"""Index tensors over one or several sharded dims (`x[i, j]`, `gather`): which indices this rank holds, and where.

Each rank holds one range of each dim, and indices may count from the end. Ids of tokens and classes are `owned.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._layouts.layout import Layout
from ..._torch_private import _assert_async
from ..registry import Operand


def is_contiguous_cut(x: Operand, dim: int) -> bool:
    """True if `dim` is sharded, and every rank holds one range of it."""
    axes = x.layout.axes_of(dim)
    return bool(axes) and all(x.states[axis].in_one_piece for axis in axes)


class Rows:
    """This rank's part of the indexed dims `dims` of a tensor of `layout`, for the closure of a decision.

    negative: whether the function counts a negative index from the end.
    """

    def __init__(self, layout: Layout, dims: Sequence[int], *, negative: bool = True) -> None:
        region = layout.region_at(layout.mesh.coordinate)
        self.dims = dims
        self.negative = negative
        self.sizes = [layout.shape[dim] for dim in dims]
        self.bounds = [region[dim][0] if region[dim] else (0, 0) for dim in dims]

    def local(self, indices: Sequence[Tensor], device: torch.device) -> tuple[list[Tensor], Tensor]:
        """The index tensors from the start of this rank's ranges, and where all of them lie within."""
        shifted, inside = [], None
        for index, size, (low, high) in zip(indices, self.sizes, self.bounds):
            index = index.to(device=device, dtype=torch.int64)
            check_range(index, -size if self.negative else 0, size)
            index = (torch.where(index < 0, index + size, index) if self.negative else index) - low
            mine = (index >= 0) & (index < high - low)
            inside = mine if inside is None else inside & mine
            shifted.append(index)
        return shifted, inside

    def within(self, indices: Sequence[Tensor]) -> list[Tensor]:
        """Any index that is not here replaced by one that is (0, when there is none)."""
        return [index.clamp(0, max(0, high - low - 1)) for index, (low, high) in zip(indices, self.bounds)]


def check_range(index: Tensor, low: int, high: int) -> None:
    """Raises as torch does for an index out of range, which a masked look-up would not notice."""
    if index.device.type == "meta" or not index.numel():
        return
    inside = (index >= low) & (index < high)
    if index.device.type == "cpu":
        if not inside.all():
            wrong = int(index[~inside][0])
            raise IndexError(f"index {wrong} is out of bounds for dimension with size {high}")
    else:
        _assert_async(inside.all())  # without waiting for the device


def nonempty(x: Tensor, dims: Sequence[int]) -> Tensor:
    """`x` with one zero row in each empty dim of `dims`, so that a look-up that is masked afterwards can run."""
    for dim in dims:
        if x.shape[dim] == 0:
            x = torch.cat([x, x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))], dim)
    return x
