"""Tells whether there are kernels for a device."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType | None:
    """`triton.py`, on a CUDA device where Triton is installed."""
    return _loaded() if device.type == "cuda" else None


@lru_cache(maxsize=1)
def _loaded() -> ModuleType | None:
    try:
        from . import triton
    except ImportError:
        return None
    return triton
