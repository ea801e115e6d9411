"""Attributes by which a stacked experts module says how many experts it has. Inside of its forward there are as many as
this rank holds, so they say that meanwhile.

    self.num_experts = 8    a name with "expert" in it: known
    self.E = 8              a number like theirs, which may as well be a width: tried

What is tried is the forward, on a row for each expert of this rank: if it raises, some of the others are counts,
with which it must give what each expert by itself gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations, islice

import torch
from torch import Tensor, nn

from .._plan.parts import PlanError

_TRIED = 64
Forward = Callable[[Mapping[str, Tensor], Tensor, Tensor, Mapping[str, int]], Tensor]
"""Parameters by name, rows [rows, width], the expert of each, attributes by name -> the output."""


def numbers_like(module: nn.Module, experts: int) -> tuple[list[str], list[str]]:
    """The attributes that are known to count experts, and others with the same value."""
    found = [key for key, value in vars(module).items() if type(value) is int and value == experts]
    return [key for key in found if "expert" in key], [key for key in found if "expert" not in key]


def counts_of(
    name: str, forward: Forward, slices: Callable[[slice], dict[str, Tensor]], numbers: tuple[list[str], list[str]],
    local: int, experts: int, rows: Tensor,
) -> list[str]:  # fmt: skip
    """Returns those of `numbers`, as `numbers_like` gives them, that count experts; of the others by trial.

    Arguments:
        slices: the parameters of some of the `local` experts of this rank.
        rows: one for each of these.

    Raises PlanError where the forward asks for experts of other ranks, and no attribute says why.
    Cost: a few forwards.
    """
    known, others = numbers
    each = torch.arange(local, device=rows.device)

    def gives(counting: Sequence[str], which: slice) -> Tensor:
        ids = each[which]
        return forward(slices(which), rows[which], ids - ids[0], dict.fromkeys((*known, *counting), len(ids)))

    def fits(counting: Sequence[str]) -> bool:
        try:
            together = gives(counting, slice(None))
            first, last = gives(counting, slice(0, 1)), gives(counting, slice(local - 1, local))
        except Exception:
            return False
        tolerance = 2e-2 if rows.itemsize < 4 else 1e-4
        found, expected = together[[0, local - 1]], torch.cat([first, last])
        return rows.is_meta or torch.allclose(found, expected, rtol=tolerance, atol=tolerance)

    try:
        gives((), slice(None))
        return known
    except Exception as error:
        problem = error
    tried = chain.from_iterable(combinations(others, size) for size in range(1, len(others) + 1))  # the fewest first
    found = next((counting for counting in islice(tried, _TRIED) if fits(counting)), None)
    if found is None and isinstance(problem, IndexError):
        stack = next(key for key, one in slices(slice(None)).items() if one.ndim == 3)
        raise PlanError(
            name,
            f"its forward raises an IndexError ({problem}) with the {local} of {experts} experts that this rank holds: "
            "it takes their number from elsewhere than its weights",
            [f"attributes that are {experts}  {', '.join([*known, *others]) or 'none'}"],
            [
                (f"self.{stack}.shape[0]", f"in place of that number; inside of the forward it is {local}"),
                (f"self.num_experts = {experts}", "an attribute of the module itself, which the forward reads"),
                ("expert_axis=None", "computes on every rank"),
            ],
        ) from problem
    return [*known, *(found or ())]
