"""Sums the results of tiles: gradients, and outputs by the log of their sums of exponentials."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)


class Sum:
    """The sum of tiles' gradients, in float32 for halves. The first is taken as it is where it is all rows: most often
    there is no other."""

    def __init__(self, of: Tensor) -> None:
        self._of = of
        self._wide = torch.float32 if of.dtype in _HALVES else of.dtype
        self._sum: Tensor | None = None

    def add(self, rows: tuple[int, int], part: Tensor) -> None:
        if self._sum is None:
            if part.shape[-2] == self._of.shape[-2]:
                self._sum = part
                return
            self._sum = torch.zeros_like(self._of, dtype=self._wide)
        elif self._sum.dtype != self._wide:
            self._sum = self._sum.to(self._wide)
        rows_of(self._sum, rows).add_(part)

    def total(self) -> Tensor:
        return torch.zeros_like(self._of) if self._sum is None else self._sum.to(self._of.dtype)


class Merged:
    """Results of tiles, merged: in float32 for halves, and in the memory order that torch's kernels give."""

    def __init__(self, query: Tensor, value: Tensor, is_masked: bool) -> None:
        self._query, self._value = query, value
        self._wide = torch.float32 if query.dtype in _HALVES else query.dtype
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._is_masked = is_masked
        self.all_see = False
        """True if every row is known to see a column."""

    def add(self, rows: tuple[int, int], part: Tensor, lse: Tensor) -> None:
        """A tile's result: weights of the two are their shares of the sum of exponentials."""
        if self._out is None:
            if rows == (0, self._query.shape[-2]):  # nothing to merge with
                self._out, self._lse, self.all_see = part, lse.to(self._wide), not self._is_masked
                return
            self._make_room()
        elif self._out.dtype != self._wide:
            self._out = self._out.to(self._wide)
        out, before = rows_of(self._out, rows), rows_of(self._lse, rows, -1)
        total = torch.logaddexp(before, lse)
        share = torch.exp(lse - (total if self.all_see else total.masked_fill(total == -inf, 0.0))).unsqueeze(-1)
        out.lerp_(part.to(out.dtype), share.to(out.dtype))
        before.copy_(total)

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the output of all tiles together, and the log of the sum of exponentials."""
        if self._out is None:
            self._make_room()
        return self._out.to(dtype), self._lse

    def _make_room(self) -> None:
        """Makes room for rows that have seen nothing so far."""
        shape = (*self._query.shape[:-1], self._value.shape[-1])
        if len(shape) == 4:
            batch, heads, rows, width = shape
            self._out = self._query.new_zeros((batch, rows, heads, width), dtype=self._wide).transpose(1, 2)
        else:
            self._out = self._query.new_zeros(shape, dtype=self._wide)
        self._lse = self._query.new_full(shape[:-1], -inf, dtype=self._wide)


def rows_of(tensor: Tensor, rows: tuple[int, int], dim: int = -2) -> Tensor:
    """A range of a dim; the tensor itself where that is all of it."""
    start, stop = rows
    return tensor if stop - start == tensor.shape[dim] else tensor.narrow(dim, start, stop - start)
