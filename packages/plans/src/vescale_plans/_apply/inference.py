"""Tensors that are made under `torch.inference_mode()` count no writes: what a forward gets is made outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def writes_counted() -> Iterator[None]:
    """Tensors that are made within it count their writes, in whichever mode the call runs."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
