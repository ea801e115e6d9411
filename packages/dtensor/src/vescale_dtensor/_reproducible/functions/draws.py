"""Random numbers in the reproducible mode: drawn row by row, wherever the elements lie.

torch fills memory: a transposed tensor gets other numbers than its contiguous copy, and what one device has transposed
may lie in order on a mesh, after it travelled. So whatever draws for the elements of a tensor gets a contiguous one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._rules.registry import Entry, is_inplace
from ..._rules.traits import Trait


def draws_by_place(entry: Entry) -> bool:
    """True if a function draws a number for each element of its first tensor."""
    traits = entry.traits
    return Trait.DRAWS in traits and (entry.handler is not None or Trait.ELEMENTWISE in traits)


def in_rows(call: Callable, function: Any, args: tuple, kwargs: dict) -> Any:
    """`call(function, args, kwargs)` with the first tensor contiguous; it is itself where it comes out again."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.is_contiguous():
        return call(function, args, kwargs)
    if is_inplace(function) or kwargs.get("inplace") is True:
        return x.copy_(call(function, (x.clone(memory_format=torch.contiguous_format), *args[1:]), kwargs))
    rows = x.contiguous()
    out = call(function, (rows, *args[1:]), kwargs)
    return x if out is rows else out
