"""Whole plain tensors, as other libraries keep and write them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from vescale_dtensor import DTensor
from vescale_trace.values import map_tensors


def barrier() -> None:
    """Waits for all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def full(value: Any) -> Any:
    """Replaces every DTensor in nested containers by a whole plain tensor. Cost: an all-gather of what is sharded."""
    return map_tensors(value, lambda one: one.full_tensor() if isinstance(one, DTensor) else one)
