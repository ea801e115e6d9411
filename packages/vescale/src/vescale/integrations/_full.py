"""Whole plain tensors, as other libraries keep and write them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import DTensor


def is_first() -> bool:
    """True on the rank that writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    """Waits for all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def full(value: Any) -> Any:
    """Replaces every DTensor in nested containers by a whole plain tensor. Cost: an all-gather of what is sharded."""
    if isinstance(value, Tensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, (tuple, list)):
        items = [full(one) for one in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return type(value)({name: full(one) for name, one in value.items()})
    return value
