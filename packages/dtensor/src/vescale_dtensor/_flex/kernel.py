"""What attends on plain tensors: torch's flex_attention, compiled as the user's call is; or what stands in for it.

Under a dispatch mode (static mode's first pass) torch compiles nothing, and flex_attention raises: the modes are
taken off while it runs, and do not see it. On tensors without data it is attention without a mask, which has the same
shapes, keeps the same for backward, and as many operations as a mask that leaves out nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput

from .._torch_private import flex_formula, without_dispatch_modes
from .door import FLEX, compiled

_formula = 0  # of how many blocks of `in_formulas` this is inside


@contextmanager
def in_formulas() -> Iterator[None]:
    """Within the block flex_attention runs as the formula that torch has of it, operator by operator, so that a
    dispatch mode sees every one: for who follows values through a model. All scores are in memory then."""
    global _formula
    _formula += 1
    try:
        yield
    finally:
        _formula -= 1


def attend(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
    """As torch's flex_attention, on plain tensors."""
    if query.is_meta:
        return _answered(_without_data(query, key, value, **given), given)
    if _formula:
        return _answered(flex_formula(query, key, value, **given), given)
    with without_dispatch_modes():
        return compiled(FLEX)(query, key, value, **given)


def stands_in(query: Tensor) -> bool:
    """Whether something else runs in flex_attention's place, on plain tensors too."""
    return query.is_meta or _formula > 0


def _without_data(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, **given: Any) -> tuple:
    out = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=given.get("enable_gqa", False))
    statistic = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    return out, statistic, statistic


def _answered(found: tuple[Tensor, Tensor, Tensor], given: dict[str, Any]) -> Any:
    """Result, logarithms of sums and maxima, in the form in which flex_attention gives what is asked for."""
    out, lse, largest = found
    aux = given.get("return_aux")
    if aux is not None:
        return out, AuxOutput(lse=lse if aux.lse else None, max_scores=largest if aux.max_scores else None)
    return (out, lse) if given.get("return_lse") else out
