"""Memory that is used again: to fetch it from the system, page by page, costs as much as to fill it with numbers."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

KEPT = 1 << 21  # bytes of each piece that are kept, per thread
_kept = threading.local()


def scratch(name: str, count: int, dtype: torch.dtype) -> Tensor:
    """`count` elements on CPU, 1-D, of undefined value: until the next call for the same name, in this thread."""
    size = count * dtype.itemsize
    if size > KEPT:
        return torch.empty(count, dtype=dtype)
    memory = _kept.__dict__.get(name)
    if memory is None:
        memory = _kept.__dict__[name] = torch.empty(KEPT, dtype=torch.uint8)
    return memory[:size].view(dtype)
